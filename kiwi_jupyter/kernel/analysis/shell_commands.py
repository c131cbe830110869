"""Find the shell commands in ``!…`` and ``%%bash`` that have nothing to do with a GPU."""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

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
"""Judged by how people use them in notebooks. ``kiwi run`` takes its own lease."""

_RUN_OTHERS: Final = re.compile(
    r"--(to-command|checkpoint-action|use-compress-program|exec|pager|upload-pack)|\s-I\b"
    r"|\bsystem\s*\(|/e\b|-exec\b"
)
"""Options with which harmless commands start other programs."""

_SUBSTITUTION: Final = re.compile(r"`|\$\(|<\(|>\(|\beval\b")
_SEPARATORS: Final = re.compile(r"\|\||&&|[;|&\n]")


_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?\Z")
_QUIET_OPTIONS: Final = frozenset("-u -B -E -O -OO -q -s -S -I".split())
"""Options of Python that run no other code."""


class PythonProgram(NamedTuple):
    """``source`` is the text after ``-c``, or ``path`` names a script."""

    source: str | None
    path: str


def python_program(script: str) -> PythonProgram | None:
    """Return the Python program that ``script`` runs, if it does nothing else."""
    if _SUBSTITUTION.search(script) or "\n" in script.strip():
        return None
    try:
        words = list(shlex.shlex(script.strip(), posix=True, punctuation_chars=True))
        parts = shlex.split(script, comments=True)
    except ValueError:
        return None
    if any(set(word) <= set("();<>|&") for word in words if word):
        return None  # more than one command, or its output goes somewhere
    if not parts or not _PYTHON.match(parts[0].rpartition("/")[2]):
        return None
    rest = parts[1:]
    while rest and rest[0] in _QUIET_OPTIONS:
        rest = rest[1:]
    if len(rest) >= 2 and rest[0] == "-c":
        return PythonProgram(rest[1], "")
    if rest and rest[0].endswith(".py") and not rest[0].startswith("-"):
        return PythonProgram(None, rest[0])
    return None


def may_use_gpu(script: str) -> str | None:
    """Return the first command of ``script`` that may use a GPU, as written; ``None`` if none
    does.
    """
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
