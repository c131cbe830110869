"""Fixtures: JupyterLab in a real browser, over real kernels and a real daemon on emulated GPUs.

Slow parts are shared: one browser for all tests, and one daemon with one Jupyter server for all
modules that ask for the same (``make_stage``). Each test has its own browser contexts and kernels.
If a test fails, the page and all logs are in ``test-artifacts/ui``.
"""

from __future__ import annotations

import functools
import re
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import running_browser
from daemon import running_daemon
from lab import running_lab
from lab_page import LabPage
from leftovers import nothing_left
from playwright.sync_api import Error as PlaywrightError
from sharing_stage import TAKE, A, B, Pair, Stage, write_pair

from kiwi_core.states import AntiThrash

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from playwright.sync_api import Browser

ARTIFACTS = Path(__file__).parents[2] / "test-artifacts" / "ui"
SCREENSHOTS = ARTIFACTS / "screenshots"
LOG_TAIL_BYTES = 200_000

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures ask at their end whether the test has failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def jp_asyncio_loop() -> None:
    """Replace pytest-jupyter's fixture: Playwright allows no other event loop beside its own."""


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Return the directory for pictures and logs of this run."""
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
    SCREENSHOTS.mkdir(parents=True)
    return ARTIFACTS


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def private_tmp(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Check that the tests leave neither processes nor files. The browser and pytest's own
    directory exist before, so that they do not count."""
    tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch) as directory:
        yield directory


@pytest.fixture(scope="session")
def stack(private_tmp: Path) -> Iterator[ExitStack]:
    """End what the tests started, the latest first, before ``private_tmp`` checks."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def make_stage(stack: ExitStack) -> Callable[..., Stage]:
    """``make_stage("1x128MiB")`` lives to the end of the tests, and other tests may have used it: a
    test sets what matters to it."""

    @functools.cache
    def make(sizes: str, *args: str, **lab_options: Any) -> Stage:
        daemon = stack.enter_context(running_daemon(sizes, *args))
        lab = stack.enter_context(running_lab(daemon.env, **lab_options))
        return Stage(daemon, lab)

    return make


@pytest.fixture
def open_lab(
    request: pytest.FixtureRequest, browser: Browser, artifacts: Path
) -> Iterator[Callable[..., LabPage]]:
    """``open_lab(stage)`` opens JupyterLab in its own browser (no cookies, an empty workspace).

    The kernels of its server end after the test. Kiwi's errors in a browser's console fail the
    test, unless it expects them (``page.notes.expect_error``).
    """
    opened: list[tuple[LabPage, Stage]] = []
    name = _plain(request.node.name)

    def make(stage: Stage, *, width: int = 1280, height: int = 800, **options: Any) -> LabPage:
        context = browser.new_context(
            viewport={"width": width, "height": height}, locale="en-GB", **options
        )
        page = LabPage(context, stage.lab, f"{name}-{len(opened)}")
        opened.append((page, stage))
        page.open()
        return page

    yield make
    complaints = [c for page, _ in opened for c in page.notes.unexpected()]
    if complaints or request.node.stash.get(_FAILED, False):
        _keep(artifacts / _plain(request.node.nodeid.rpartition("/")[2]), opened)
    for page, _ in opened:
        page.context.close()
    for lab in {id(stage.lab): stage.lab for _, stage in opened}.values():
        with suppress(OSError):
            lab.end_kernels()
    assert not complaints, complaints


@pytest.fixture
def screenshot(artifacts: Path) -> Callable[..., Path]:
    """``screenshot(page, "waiting-dark")`` keeps a picture with the artefacts."""

    def shoot(page: LabPage, name: str) -> Path:
        path = SCREENSHOTS / f"{name}.png"
        page.page.screenshot(path=path, animations="disabled")
        return path

    return shoot


def _plain(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")


def _keep(place: Path, opened: list[tuple[LabPage, Stage]]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for number, (page, stage) in enumerate(opened):
        with suppress(PlaywrightError):
            page.page.screenshot(path=place / f"page-{number}.png")
        with suppress(PlaywrightError):
            (place / f"page-{number}.html").write_text(page.page.content())
        (place / f"console-{number}.txt").write_text("\n".join(page.notes.console))
        (place / "server.log").write_text(stage.lab.log()[-LOG_TAIL_BYTES:])
        (place / "daemon.log").write_text(stage.daemon.log()[-LOG_TAIL_BYTES:])


@pytest.fixture
def make_pair(open_lab: Callable[..., LabPage]) -> Iterator[Callable[..., Pair]]:
    """``make_pair(stage, tq_s=600)`` opens both notebooks, which hold their memory. B used the GPU
    last and is in front, and the sidebar is open. Under ``round-robin`` B waits a whole turn."""
    made: list[Path] = []

    def make(
        stage: Stage, *, tq_s: float = 600.0, policy: str = "round-robin", **options: Any
    ) -> Pair:
        enough = stage.enough_path()
        made.append(enough)
        stage.set(tq_s=tq_s, anti_thrash=AntiThrash.ON, policy=policy)
        write_pair(stage, enough)
        page = open_lab(stage, **options)
        page.panel()
        a, b = page.open_notebook(A), page.open_notebook(B)
        a.run(TAKE)
        b.run(TAKE)
        return Pair(stage, page, a, b, enough)

    yield make
    for enough in made:
        enough.touch()
