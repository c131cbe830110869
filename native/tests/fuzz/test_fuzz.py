"""Run the fuzz target (``fuzz_link.c``) under the address and undefined-behaviour sanitizers: on
the corpus as it is, then on corrupted input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "link"))

from sanitizing import SOURCES, compile_with  # noqa: E402

PARTS = "json json_write message place wire pager protocol link alone".split()
CORRUPTED = 2000
"""Inputs made from the corpus: a number, not a time, so that a slow machine tries as many."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    own = [HERE / "driver.c", HERE / "fuzz_link.c"]
    sources = [*own, SOURCES / "base/daemon.c", *(SOURCES / f"link/{name}.c" for name in PARTS)]
    sanitizers = "address,undefined,float-cast-overflow"
    return compile_with(sanitizers, tmp_path_factory.mktemp("fuzz"), sources)


def run(driver: str, seed: int, *files: Path) -> str:
    command = [driver, str(CORRUPTED), str(seed), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_the_link_survives_any_input(driver: str, tmp_path: Path) -> None:
    corpus = sorted((HERE / "corpus").iterdir())
    long = tmp_path / "long"  # lines at the limit and beyond
    head = bytes([255]) + (HERE / "corpus" / "swap").read_bytes()[1:]
    line = b'{"type":"later","x":"%s"}\n'
    long.write_bytes(head + line % (b"y" * 65_500) + line % (b"z" * 65_600))
    assert run(driver, 4, *corpus, long) == f"{CORRUPTED} inputs\n"
