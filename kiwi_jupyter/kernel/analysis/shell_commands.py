"""Shell commands of ``!…`` and ``%%bash``: which plainly have nothing to do with a GPU."""

from __future__ import annotations

import re
import shlex
from typing import Final

HARMLESS: Final = frozenset(
    """
    : apt apt-get awk basename cal cat cd chmod clear cmp comm conda cp curl cut date df diff
    dirname du echo egrep expr false fgrep file free git grep groups gunzip gzip head hostname id
    kiwi less ln locale ls lsb_release lscpu lsmem lspci mamba md5sum mkdir mktemp more mv nl nproc
    nvcc nvidia-smi pip pip3 printf ps pwd readlink realpath rm rmdir sed seq sha256sum sleep sort
    stat tail tac tar tee test touch tr tree true type uname uniq unzip uptime wc wget whereis
    which whoami xxd zcat zip
    """.split()
)
"""Judged by what people use them for in notebooks. ``kiwi run`` takes a lease of its own."""

_RUN_OTHERS: Final = re.compile(
    r"--(to-command|checkpoint-action|use-compress-program|exec|pager|upload-pack)|\s-I\b"
    r"|\bsystem\s*\(|/e\b|-exec\b"
)
"""Options by which harmless commands start others."""

_SUBSTITUTION: Final = re.compile(r"`|\$\(|<\(|>\(|\beval\b")
_SEPARATORS: Final = re.compile(r"\|\||&&|[;|&\n]")


def may_use_gpu(script: str) -> str | None:
    """The first command of ``script`` that may use a GPU, as written; ``None`` if none does."""
    if _SUBSTITUTION.search(script):
        return script.strip()
    for command in _SEPARATORS.split(re.sub(r"\d?>&\d", "", script)):
        if not _is_harmless(command):
            return command.strip()
    return None


def _is_harmless(command: str) -> bool:
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return False
    words = words[1:] if words[:1] == ["sudo"] else words
    if not words:
        return True
    return words[0].rpartition("/")[2] in HARMLESS and not _RUN_OTHERS.search(command)
