"""Tests that the documentation matches the code: settings, commands, files, links, examples."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import running_daemon, wait_until
from traitlets.config import Config

from kiwi_core.cli.app import COMMANDS, _parser
from kiwi_core.daemon.engine.journal import KEPT
from kiwi_core.metrics import families
from kiwi_core.pager.api import Pager
from kiwi_core.sched.model.policy import Policy
from kiwi_core.states import Notice, Reason, SessionState
from kiwi_core.terms import STATES
from kiwi_core.wire.words import format_wait_s
from kiwi_jupyter.kernel.config import Kiwi
from kiwi_jupyter.kernel.magics import HELP
from kiwi_jupyter.server_ext.app import KiwiServerApp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        ROOT / "emulator/README.md",
        ROOT / "native/README.md",
        *ROOT.glob("integrations/*/README.md"),
    ]
)
LINK = re.compile(r"\[[^\]\[]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def page(name: str) -> str:
    return (DOCS / name).read_text()


# --- settings -----------------------------------------------------------------------------------


def reference() -> ModuleType:
    return of_docs("reference")


PACKAGES = ["ipykernel", "ipython", "jupyterlab", "notebook", "cuda-bindings", "cuda-core"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_supported_versions_are_those_of_the_package_and_of_the_tests(package: str) -> None:
    ((supported, tested),) = re.findall(
        rf"^\| {package}(?:,[^|]*)? \| (.+) \| (.+) \|$",
        page("supported-versions.md"),
        re.MULTILINE | re.IGNORECASE,
    )
    wanted = re.findall(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert wanted == [wanted[0]] * len(wanted)
    assert re.match(rf"{wanted[0].removesuffix('.0')}\b", supported)
    locks = [
        lock for name in ("old", "dev") for lock in (ROOT / "requirements").glob(f"{name}-*.txt")
    ]
    installed = [
        version
        for lock in locks
        for version in re.findall(rf"^{package}==(\d+\.\d+)", lock.read_text(), re.MULTILINE)
    ]
    now = ", ".join(dict.fromkeys(installed))
    assert tested == now, f"requirements/ has {package} {now}: say so in supported-versions.md"


@cache
def of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kiwi_docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_the_codes_own() -> None:
    for each in reference().PAGES:
        text = each.read_text()
        assert reference().written_anew(text) == text, "run: .venv/bin/python docs/reference.py"


def test_every_trait_option_and_limit_is_in_a_table() -> None:
    text = page("configuration.md")
    for trait in Kiwi.class_own_traits(config=True):
        assert f"| `c.Kiwi.{trait}` |" in text
    for trait in KiwiServerApp.class_own_traits(config=True):
        assert f"| `c.KiwiServerApp.{trait}` |" in text
    for parser in reference().parsers().values():
        for action in parser._actions:
            if action.option_strings and action.dest != "help":
                assert f"| `{', '.join(action.option_strings)}` |" in text
    written = "".join(each.read_text() for each in reference().PAGES)
    assert written.count("<!-- begin: ") == len(reference().BLOCKS)


def test_every_metric_is_in_the_table() -> None:
    text = page("metrics.md")
    named = set(re.findall(r"`(kiwi_[a-z_]+)", text))
    exposed = {f"{families.INFO[0]}_info", families.UP[0], families.WAITS.name}
    exposed |= {family.name for family in families.FAMILIES}
    assert exposed <= named
    parts = {f"{families.WAITS.name}_{part}" for part in ("bucket", "sum", "count")}
    in_queries = set(
        re.findall(r"\b(kiwi_[a-z_]+)", "".join(fences(DOCS / "metrics.md", "promql")))
    )
    assert in_queries
    assert named | in_queries <= exposed | parts


def variables() -> Iterator[str]:
    """Yield the environment variables that the code names."""
    tops = ("kiwi_core", "kiwi_jupyter", "native/src", "emulator", "integrations", "packaging")
    sources = [
        path for top in tops for path in (ROOT / top).rglob("*") if "tests" not in path.parts
    ]
    for path in sources:
        if path.suffix in (".py", ".c", ".h", ".service"):
            yield from re.findall(r"\bKIWI_[A-Z_]+(?<!_H)\b", path.read_text())


def test_every_environment_variable_is_explained() -> None:
    text = page("configuration.md")
    found = set(variables())
    assert {"KIWI_SOCKET_DIR", "KIWI_DAEMON_OPTIONS", "KIWI_EMULATOR_STATE"} <= found
    for name in found:
        assert re.search(rf"^\|[^|]*`{name}`", text, re.MULTILINE), name


def test_the_example_configuration_can_be_read() -> None:
    config = Config()
    for example in fences(DOCS / "configuration.md", "python"):
        if "get_config" in example:
            exec(example, {"get_config": lambda: config})
    kiwi = Kiwi(config=config)
    assert set(config.Kiwi) <= set(Kiwi.class_own_traits(config=True))
    assert kiwi.cpu_modules == ["my_plotting_helpers"]
    assert set(config.KiwiServerApp) <= set(KiwiServerApp.class_own_traits(config=True))
    assert KiwiServerApp(config=config).may_change_settings == ["ada", "bob"]


# --- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*Notice, *Reason], ids=lambda word: word.value)
def test_every_problem_has_a_remedy(word: Notice | Reason) -> None:
    said, _, _doctor = page("troubleshooting.md").partition("## What `kiwi doctor` finds")
    (row,) = re.findall(rf"^\| `{word.value}` \|(.+)\|(.+)\|$", said, re.MULTILINE)
    assert all(cell.strip() for cell in row)


def test_the_glossary_has_every_state_and_every_word_once() -> None:
    words = re.findall(r"^\| (?!word |state |---)([^|]+) \|", page("glossary.md"), re.MULTILINE)
    assert {f"`{state.value}`" for state in SessionState} <= set(words)
    assert len(words) == len(set(words)) > 40


def areas() -> set[str]:
    """Return the names of what ``kiwi doctor`` examines."""
    found = set()
    folder = ROOT / "kiwi_core/cli"
    for path in [*(folder / "checks").glob("*.py"), folder / "doctor.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in ("ok", "warn", "fail", "_within") and node.args:  # type: ignore[attr-defined]
                first = node.args[0]  # type: ignore[attr-defined]
                if isinstance(first, ast.Constant):
                    found.add(first.value)
    return found


def test_every_area_of_the_doctor_is_explained() -> None:
    assert {"system", "checkpoint", "sockets", "emulator"} <= areas()
    for area in areas():
        assert re.search(rf"^\|[^|]*`{area}`", page("troubleshooting.md"), re.MULTILINE), area


def test_every_magic_is_explained_and_no_other() -> None:
    text = page("notebooks.md")
    known = set(re.findall(r"^  (%%?kiwi [a-z]+)", HELP, re.MULTILINE)) | {"%kiwi on"}
    for magic in known:
        assert f"`{magic}`" in text, magic
    for each in PAGES:
        for said in re.findall(r"`(%%?kiwi [a-z]+)", each.read_text()):
            assert said in known, f"{name_of(each)}: {said}"


def lab_sources() -> str:
    """Return all sources of texts on JupyterLab's screen, without line breaks in strings."""
    found = [*(ROOT / "labextension/src").rglob("*.ts*"), ROOT / "labextension/schema/plugin.json"]
    found += (ROOT / "kiwi_jupyter/server_ext").glob("*.py")
    found += [ROOT / "kiwi_core/client/autostart.py", ROOT / "kiwi_core/daemon/user_texts.py"]
    return "".join(path.read_text() for path in found)


def said_on_screen() -> list[str]:
    """Return the texts that the page on JupyterLab quotes, which are bold there."""
    return re.findall(r"\*\*(.+?)\*\*", page("jupyterlab.md").replace("\n", " "))


def test_words_of_the_sidebar_are_the_codes_own() -> None:
    sources = lab_sources()
    for words in set(said_on_screen()) - {"bold"}:
        # The code fills in numbers, places and placeholders.
        for part in re.split(r"^GPU: |…|\d+(?:st|nd|rd|th)?", words):
            text = part.strip(" ,.")
            term = text[:1].lower() + text[1:]  # asTitle() gives a term its capital letter
            assert {text in sources, term in sources} != {False}, f"nowhere on the screen: {words}"


def test_every_form_of_a_wait_is_explained() -> None:
    page = (DOCS / "jupyterlab.md").read_text()
    forms = [format_wait_s(12), format_wait_s(15, 10, 25), format_wait_s(5, 0, 7), format_wait_s(0)]
    assert len(set(forms)) == 4
    assert [form for form in forms if f"**{form}**" not in page] == []


def test_every_state_on_the_screen_is_explained() -> None:
    """Headlines of the sidebar, words of the status bar, commands, modes, policies."""
    source = ROOT / "labextension/src"
    said = set(said_on_screen())
    status = re.findall(
        r"\bmakeStatus\(\s*trans\.__\('([^']+)'", (source / "model/status.ts").read_text()
    )
    model = (source / "panel/mywait-model.ts").read_text()
    headlines = re.findall(r"\bmakeWait\('\w+', [\w.]+, trans\.__\('(.+?)'\),", model)
    choices = re.findall(
        r"label: trans\.__\('([^']+)'", (source / "panel/controls-model.ts").read_text()
    )
    assert {"yours", "memory lost"} <= set(status)
    assert len(choices) == 3 + 2, "modes and policies"
    assert {f"GPU: {words}" for words in status} <= said
    assert {"Has the GPU", "Busy"} <= set(headlines)
    assert set(headlines) | set(choices) <= said
    for state in (SessionState.PAGED_OUT, SessionState.PAGING_OUT, SessionState.PAGING_IN):
        word = STATES[state]
        assert {f"GPU: {word}", word.capitalize()} <= said


def test_every_setting_of_the_labextension_is_in_the_table() -> None:
    schema = reference().lab_schema()
    assert schema["properties"]
    for name, of in schema["properties"].items():
        assert f"| **{of['title']}** | `{name}` |" in page("jupyterlab.md")
    keys = {key for each in schema["jupyter.lab.shortcuts"] for key in each["keys"]}
    assert keys == {"Accel Alt K"}, "the page says Control+Alt+K"


@pytest.mark.parametrize("interface", [Pager, Policy], ids=lambda interface: interface.__name__)
def test_every_call_of_an_interface_is_explained(interface: type) -> None:
    calls = [name for name in vars(interface) if not name.startswith("_")]
    assert len(calls) > 5
    for name in calls:
        assert re.search(rf"`{name}[`(]", page("extending.md")), name


def test_only_the_hub_page_makes_connections_to_other_machines() -> None:
    """docs/security.md and the README say that Kiwi sends nothing anywhere."""
    clients = r"urllib\.request|http\.client|httpx|aiohttp|requests(?=$|\.)|tornado\.httpclient"
    found = {
        str(path.relative_to(ROOT))
        for package in ("kiwi_core", "kiwi_jupyter", "integrations")
        for path in (ROOT / package).rglob("*.py")
        if re.search(rf"^\s*(?:from|import) (?:{clients})\b", path.read_text(), re.MULTILINE)
    }
    assert found == {"integrations/jupyterhub/kiwi_jupyterhub/waits.py"}
    assert "Kiwi sends nothing anywhere" in (ROOT / "README.md").read_text()
    assert "Kiwi sends nothing anywhere" in page("security.md")


# --- links and paths ----------------------------------------------------------------------------


def test_no_merge_is_left_unresolved() -> None:
    markers = ["-e", "^<<<<<<< ", "-e", "^>>>>>>> "]
    found = subprocess.run(["git", "-C", str(ROOT), "grep", "-n", *markers], capture_output=True)
    assert (found.returncode, found.stdout) == (1, b""), found.stdout


def slug(heading: str) -> str:
    """Return GitHub's name for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)}


@pytest.mark.parametrize("each", PAGES, ids=name_of)
def test_links_lead_somewhere(each: Path) -> None:
    for link in LINK.findall(prose(each)):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (each.parent / target).resolve() if target else each
        assert path.exists(), link
        assert path.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(path), link


@pytest.mark.parametrize("each", PAGES, ids=name_of)
def test_paths_that_are_named_exist(each: Path) -> None:
    tops = "kiwi_core|kiwi_jupyter|tests|docs|examples|benchmarks|packaging|requirements"
    for span in SPAN.findall(prose(each)):
        if re.fullmatch(rf"({tops})/[\w./*-]*", span):
            assert list(ROOT.glob(span.rstrip("/"))), f"there is no {span}"


# --- commands -----------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Yield every command shown to a reader, as words, without ``sudo`` and settings before it."""
    for each in PAGES:
        for block in fences(each, "console"):
            for line in block.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
                    del words[0]
                if words:
                    yield each, words


def test_commands_are_found() -> None:
    shown = {tuple(words[:2]) for each, words in commands() if each.name == "README.md"}
    assert {("make", "demo"), ("make", "test"), ("kiwi", "doctor")} <= shown


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return {
        word for line in re.findall(r"^([\w -]+):", text, re.MULTILINE) for word in line.split()
    }


@pytest.mark.parametrize(
    ("each", "words"),
    list(commands()),
    ids=lambda x: name_of(x) if isinstance(x, Path) else " ".join(x),
)
def test_a_command_can_be_given(each: Path, words: list[str]) -> None:
    program = Path(words[0]).name
    if program == "kiwi":
        understood(words[1 : words.index(">") if ">" in words else None])
    elif program == "make":
        assert {word for word in words[1:] if "=" not in word} <= targets()
    elif program == "python" and words[0].startswith(".venv/"):
        named = [word for word in words[1:] if "/" in word]
        assert all((ROOT / word).exists() for word in named), named
    elif program == "cp":
        assert (ROOT / words[1]).exists()
    else:
        assert program in {"pip", "python3", "jupyter", "rm", "systemctl"}, f"unknown here: {words}"


def understood(words: list[str]) -> None:
    """Check that ``kiwi`` accepts these words; nothing is run."""
    parser, module = _parser(words[0])
    assert module is not None, f"there is no command kiwi {words[0]}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"kiwi {shlex.join(words)}: {said.getvalue()}")


@pytest.mark.parametrize("each", PAGES, ids=name_of)
def test_commands_in_sentences_exist(each: Path) -> None:
    for span in SPAN.findall(prose(each)):
        words = span.split()
        if words[0] != "kiwi" or len(words) < 2 or not re.fullmatch(r"[a-z]+", words[1]):
            continue
        assert words[1] in COMMANDS, span
        options = {o for a in reference().parsers()[words[1]]._actions for o in a.option_strings}
        mine = words[2 : words.index("--")] if "--" in words else words[2:]
        assert {word for word in mine if word.startswith("--")} <= options, span


# --- real things --------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.timeout(60)
def test_files_and_the_example_client_on_a_real_daemon(tmp_path: Path) -> None:
    """Every file that a daemon makes is in the page's tables, and the client of the page on
    extending takes its turn."""
    seen: list[str] = []
    with running_daemon("1x64MiB") as daemon:
        (socket,) = daemon.directory.glob("*.sock")
        take_a_turn()(str(socket), lambda: seen.append(holder(daemon)))
        made = {path.name for path in daemon.directory.iterdir()}
        state = (daemon.directory / "state").iterdir()
        # A roster that is being written has this suffix for a moment.
        made |= {path.name for path in state if path.suffix != ".new"}
        uuid = socket.stem
    assert seen == [f"job {os.getpid()}"]
    assert {f"{uuid}.journal", f"{uuid}.roster"} <= made
    rows = " ".join(re.findall(r"^\| (`.+?) \|", page("configuration.md"), re.MULTILINE))
    for name in made:
        assert f"`{name.replace(uuid, '<UUID>')}" in rows, name
    assert f"`.journal.{KEPT}`" in rows


def take_a_turn() -> Callable[[str, Callable[[], object]], None]:
    """Return the client of the page on extending, which calls itself ``job <pid>``."""
    client = next(text for text in fences(DOCS / "extending.md", "python") if "take_a_turn" in text)
    names: dict[str, Any] = {}
    exec(client, names)
    return names["take_a_turn"]


def says_it_holds_names(file: str) -> bool:
    """Return what the page on security says that a file holds."""
    (what,) = re.findall(rf"^\| `{file}` \|.*\| (.*) \|$", page("security.md"), re.MULTILINE)
    return "names of notebooks" in what


@pytest.mark.e2e
@pytest.mark.timeout(60)
def test_names_of_notebooks_are_in_the_files_that_the_page_says_and_in_no_other() -> None:
    with running_daemon("1x64MiB") as daemon:
        (socket,) = daemon.directory.glob("*.sock")
        state, name = daemon.directory / "state", f"job {os.getpid()}".encode()
        roster = state / f"{socket.stem}.roster"
        take_a_turn()(
            str(socket), lambda: wait_until(lambda: name in roster.read_bytes(), "it is written")
        )
        assert daemon.terminate() == 0
        contents = {path.name: path.read_bytes() for path in state.iterdir()}
        log = daemon.log().encode()
    kinds = {kind: contents[f"{socket.stem}.{kind}"] for kind in ("journal", "usage", "roster")}
    holds = {f"state/<UUID>.{kind}": name in data for kind, data in kinds.items()}
    holds |= {"state/<UUID>.roster": True, "sockets/daemon.log": name in log}
    assert b"LeaseRequested" in kinds["journal"], "what happened to it is in the journal"
    assert holds == {file: says_it_holds_names(file) for file in holds}
    assert set(holds.values()) == {True, False}


def holder(daemon: Any) -> str:
    (only,) = daemon.status().sessions
    assert daemon.status().holders == [only.id]
    return str(only.name)
