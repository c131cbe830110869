"""Tests that the Makefile explains its targets, and that `make test` omits no test directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thorough

ROOT = Path(__file__).parents[2]
WITHOUT_OUTER_MAKE = {name: v for name, v in os.environ.items() if not name.startswith("MAKE")}
"""`make test` runs this test: its flags (-j, -n) are not meant for the make started here."""


def make(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=WITHOUT_OUTER_MAKE,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def described() -> set[str]:
    return set(re.findall(r"^  make (\S+)", make(), re.MULTILINE))


def test_help_is_the_default_and_names_what_people_need() -> None:
    assert make() == make("help")
    assert {"setup", "test", "fast", "lint", "types", "demo", "bench", "clean"} <= described()


def test_help_begins_with_what_a_newcomer_needs() -> None:
    first, _, _others = make().partition("All others:")
    named = set(re.findall(r"^  make (\S+)", first, re.MULTILINE))
    assert named == {"setup", "demo", "test", "fast", "format", "docs"}


def test_everything_that_help_names_is_a_target() -> None:
    text = (ROOT / "Makefile").read_text()
    assert described() == set(re.findall(r"^([a-z0-9-]+):.*##", text, re.MULTILINE))


def stages(name: str = "STAGES") -> list[str]:
    """Return the targets of `make test` (``THOROUGH_STAGES``: of `make test-all`), one by one."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(rf"^{name} := (.*)$", text, re.MULTILINE)
    assert found
    return found[1].split()


@pytest.fixture(scope="module")
def commands_of_test() -> str:
    # -n prints and runs nothing; pretend that the environments are there and up to date.
    ready = [
        ".venv/.kiwi-installed",
        ".venv/.kiwi-jupyterlab",
        ".venv/.kiwi-ready",
        ".venvs/old/.kiwi-ready",
        ".venvs/clients/.kiwi-ready",
        "labextension/node_modules/.package-lock.json",
        ".venv/.kiwi-lab-ready",
    ]
    return make("-n", *(word for file in ready for word in ("-o", file)), *stages())


TOOLS = (
    "ruff check", "ruff format", "mypy", "lint-imports", "rooms.py", "coverage", "sphinx-build",
    "run lint", "run types",
)  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_make_test_runs(commands_of_test: str, tool: str) -> None:
    assert tool in commands_of_test


def test_make_test_installs_node_packages_once(commands_of_test: str) -> None:
    """They are already there, and as new as their lock, so nothing is installed."""
    assert "npm --prefix labextension --silent run test" in commands_of_test
    assert " ci " not in commands_of_test


def test_make_test_reaches_every_test_directory(commands_of_test: str) -> None:
    """A suite names the directory, or takes all of tests/ and omits only named ones."""
    commands_of_test = commands_of_test.replace("\\\n", " ")
    lines = commands_of_test.splitlines()
    suites = [line for line in lines if "pytest" in line and "--collect-only" not in line]
    for directory in sorted((ROOT / "tests").iterdir()):
        if list(directory.rglob("test_*.py")):
            name = f"tests/{directory.name}"
            named = any(re.search(rf"(?<!=){name}(?!\w)", suite) for suite in suites)
            swept = any(
                re.search(r" tests(?= )", suite) and f"--ignore={name} " not in f"{suite} "
                for suite in suites
            )
            assert named or swept, f"make test leaves out {name}"


def test_every_line_of_the_thorough_tests_names_a_test() -> None:
    files = sorted({line.partition("::")[0] for line in thorough.lines()})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "thorough", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    named = [line for line in done.stdout.splitlines() if "::" in line]
    for line in thorough.lines():
        assert any(map(thorough.pattern(line).fullmatch, named)), line


def test_what_make_test_leaves_out_make_test_all_runs() -> None:
    """Each suite of `make test` deselects the thorough tests, and each directory is in a suite of
    `make test-all`."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    suites = {
        name: recipe
        for name, recipe in re.findall(r"^([a-z0-9-]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)
        if " tests" in recipe or "$(TESTS)" in recipe
    }
    quick = [name for name in stages() if name in suites]
    assert len(quick) >= 7
    assert all(re.search(r"\$\(QUICK(_MARKS)?\)", suites[name]) for name in quick)
    rest = [
        suites[name] for name in stages("THOROUGH_STAGES") if "$(THOROUGH)" in suites.get(name, "")
    ]
    assert len(rest) == 3
    left_out = set(re.findall(r"--ignore=(\S+)", " ".join(rest)))
    assert all(any(f" {directory}\n" in recipe for recipe in rest) for directory in left_out)


@pytest.mark.parametrize(
    ("broken", "made"),
    [("", "setup one two three"), ("two", "setup one two three"), ("setup", "setup")],
)
def test_a_stage_that_fails_hides_no_other(tmp_path: Path, broken: str, made: str) -> None:
    """All stages run and the summary comes last, unless an environment cannot be made."""
    lines = [
        f"{name}:\n\t@echo made-{name}; scripts/step {name} {'false' if name == broken else 'true'}"
        for name in ("setup", "one", "two", "three")
    ]
    (tmp_path / "Makefile").write_text("\n".join(lines) + "\n")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    done = subprocess.run(
        ["scripts/stages", "one", "two", "three"],
        cwd=tmp_path,
        env=WITHOUT_OUTER_MAKE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert sorted(re.findall(r"made-(\w+)", done.stdout)) == sorted(made.split())
    assert (done.returncode == 0) == (not broken)
    if broken != "setup":
        summary = done.stdout.partition("== where the time went")[2]
        assert len(re.findall(r"^ *\d+ s  \w+ +(?:ok|FAILED)", summary, re.MULTILINE)) == 4
        assert ("FAILED: two" in summary.splitlines()[-1]) == bool(broken)
