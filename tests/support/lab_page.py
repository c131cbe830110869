"""JupyterLab in a browser, as a user sees and uses it: notebooks, cells, the Kiwi sidebar.

Cells are run by the command behind the toolbar's button rather than by keys, which would go to the
element that has the focus. All results are read from the page.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daemon import wait_until
from lab import TOKEN
from playwright.sync_api import expect

if TYPE_CHECKING:
    from lab import Lab
    from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Locator, Page, Response

PATIENCE_MS = 60_000.0
"""Time limit for what should take a moment: the machine may be busy."""

expect.set_options(timeout=PATIENCE_MS)

EDGE_PX = 8
"""Accuracy with which the edge of a sidebar can be dragged: the edge is some pixels wide itself."""

_OF_OURS = re.compile(r"kiwi", re.IGNORECASE)

_FIND = """
const find = path => {
  for (const area of ['main', 'down', 'right'])
    for (const widget of window.jupyterapp.shell.widgets(area))
      if (widget.context?.path === path && widget.sessionContext) return widget;
  throw new Error(`${path} is not open`);
};
"""

_OPEN = (
    "async ([path, below]) => {"
    + _FIND
    + """
  const options = below ? { mode: 'split-bottom', ref: find(below).id } : {};
  const widget = await window.jupyterapp.commands.execute(
    'docmanager:open', { path, factory: 'Notebook', options });
  await widget.context.ready;
  await widget.sessionContext.ready;
  await widget.sessionContext.session.kernel.info;
}"""
)

_KERNEL_ANSWERS = (
    "async path => {"
    + _FIND
    + """
  const until = async look => {
    for (;;) {
      try { const found = look(); if (found) return found; } catch {}
      await new Promise(resolve => setTimeout(resolve, 50));
    }
  };
  const widget = await until(() => find(path));
  await widget.context.ready;
  await widget.sessionContext.ready;
  await (await until(() => widget.sessionContext.session?.kernel)).info;
}"""
)

_TO_FRONT = "path => {" + _FIND + "window.jupyterapp.shell.activateById(find(path).id); }"

_IN_FRONT = "path => {" + _FIND + "return window.jupyterapp.shell.currentWidget === find(path); }"

_RUN = (
    "([path, index]) => {"
    + _FIND
    + """
  const notebook = find(path).content;
  notebook.activeCellIndex = index;
  notebook.deselectAll();
  void window.jupyterapp.commands.execute('notebook:run-cell');
}"""
)

_OUTPUTS = (
    "([path, index]) => {"
    + _FIND
    + "return find(path).content.widgets[index].model.outputs.toJSON(); }"
)

_BOUNDED = """async ([source, argument, within_ms]) => {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not within ${within_ms} ms: ${source}`)), within_ms);
  });
  try {
    return await Promise.race([eval(`(${source})`)(argument), late]);
  } finally {
    clearTimeout(timer);
  }
}"""

_SHOWN = (
    "path => { try {" + _FIND + "return !!find(path).sessionContext.session?.kernel; }"
    " catch { return false; } }"
)

_DOM_ID = "path => {" + _FIND + "return find(path).id; }"


@dataclass
class Notes:
    """Messages of the browser while a page was open."""

    console: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors that concern Kiwi."""
    expected: list[re.Pattern[str]] = field(default_factory=list)

    def expect_error(self, pattern: str) -> None:
        """Expect errors that match ``pattern``, for a test that breaks something."""
        self.expected.append(re.compile(pattern))

    def unexpected(self) -> list[str]:
        return [c for c in self.complaints if not any(e.search(c) for e in self.expected)]

    def listen(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self._error(f"{error}\n{error.stack or ''}"))
        page.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        place = message.location
        text = f"{message.type}: {message.text} ({place['url']}:{place['lineNumber']})"
        self.console.append(text)
        if message.type == "error" and _OF_OURS.search(text):
            self.complaints.append(text)

    def _error(self, text: str) -> None:
        self.console.append(f"pageerror: {text}")
        if _OF_OURS.search(text):
            self.complaints.append(f"pageerror: {text}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.console.append(f"answer {response.status}: {response.url}")


class LabPage:
    """A browser tab with JupyterLab, made by the fixture ``open_lab``."""

    def __init__(self, context: BrowserContext, lab: Lab, workspace: str) -> None:
        self.context, self.lab, self.workspace = context, lab, workspace
        self.notes = Notes()
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.notes.listen(self.page)
        self.page.on("dialog", _answer)

    def open(self) -> None:
        """Open the test's own workspace, which restores nothing of another test."""
        place = {"lab": f"lab/workspaces/{self.workspace}", "notebook": "tree"}[self.lab.app]
        self.page.goto(f"{self.lab.url}/{place}?token={TOKEN}")
        self.wait_ready()

    def reload(self) -> None:
        self.page.reload()
        self.wait_ready()

    def wait_saved(self, path: str) -> None:
        """Wait until a reload would open the notebook ``path`` again, in front."""

        def saved() -> bool:
            try:
                data = self.lab.rest("GET", f"lab/api/workspaces/{self.workspace}")["data"]
            except OSError:  # not saved yet
                return False
            current = data.get("layout-restorer:data", {}).get("main", {}).get("current")
            return current == f"notebook:{path}"

        wait_until(saved, f"the workspace with {path}")

    def wait_ready(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp !== undefined")
        await_in(self.page, "async () => { await window.jupyterapp.restored; }")
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)

    def command(self, name: str, **arguments: Any) -> None:
        self.page.evaluate(
            "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
            [name, arguments],
        )

    def theme(self, name: str) -> None:
        await_in(
            self.page,
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })",
            name,
        )
        light = "true" if "Light" in name else "false"
        self.page.wait_for_selector(
            f"body[data-jp-theme-name='{name}'][data-jp-theme-light='{light}']", state="attached"
        )

    def open_notebook(self, path: str, *, below: str = "") -> NotebookPane:
        """Open a notebook and wait until its kernel answers, in a tab, or under the notebook
        ``below``."""
        await_in(self.page, _OPEN, [path, below])
        return NotebookPane(self, path)

    def notebook(self, path: str) -> NotebookPane:
        """Return a notebook that is already open."""
        return NotebookPane(self, path)

    def shown(self, path: str) -> NotebookPane:
        """Return a notebook that the page opens by itself, once its kernel answers."""
        await_in(self.page, _KERNEL_ANSWERS, path)
        return NotebookPane(self, path)

    def panel_shown(self) -> Panel:
        """Return the sidebar, which must open by itself."""
        found = Panel(self.page)
        expect(found.root).to_be_visible(timeout=PATIENCE_MS)
        return found

    def panel(self) -> Panel:
        """Open the sidebar if need be, and return it."""
        found = Panel(self.page)
        if not found.root.is_visible():
            self.command("kiwi:open-panel")
        return self.panel_shown()

    def resize_sidebar(self, width_px: int) -> None:
        """Drag the edge of the sidebar, as a user does, until the sidebar is about that wide."""

        def dragged() -> bool:
            box = self.panel().root.bounding_box()
            assert box is not None
            if abs(box["width"] - width_px) <= EDGE_PX:
                return True
            self._drag_edge(box["x"], box["x"] + box["width"] - width_px)
            return False

        wait_until(dragged, f"a sidebar of {width_px} px")

    def _drag_edge(self, edge_x: float, target_x: float) -> None:
        handles = self.page.locator("#jp-main-split-panel > .lm-SplitPanel-handle:visible").all()
        boxes = [(handle, handle.bounding_box()) for handle in handles]
        handle, _ = min(boxes, key=lambda each: abs(each[1]["x"] - edge_x) if each[1] else math.inf)
        handle.hover()  # waits until it is there for the mouse
        self.page.mouse.down()
        self.page.mouse.move(target_x, 400, steps=4)
        self.page.mouse.up()
        # If the mouse has missed the edge, some text is selected now.
        self.page.evaluate("() => window.getSelection().removeAllRanges()")

    def set_setting(self, plugin: str, name: str, value: Any) -> None:
        """Change a setting as the settings editor does."""
        await_in(
            self.page,
            """async ([plugin, name, value]) => {
              const settings = window.jupyterapp.serviceManager.settings;
              const raw = JSON.parse((await settings.fetch(plugin)).raw || '{}');
              await settings.save(plugin, JSON.stringify({ ...raw, [name]: value }));
            }""",
            [plugin, name, value],
        )
        self.reload()

    @property
    def status_item(self) -> Locator:
        return self.page.locator('[data-kiwi="status-item"]')


def await_in(page: Page, source: str, argument: Any = None) -> Any:
    """Return the result of the function ``source``; unlike ``page.evaluate``, this does not wait
    forever for a promise."""
    return page.evaluate(_BOUNDED, [source, argument, PATIENCE_MS])


def _answer(dialog: Dialog) -> None:
    """Answer a dialog; the browser asks before it leaves a page with unsaved changes."""
    if dialog.type == "beforeunload":
        dialog.accept()
    else:
        dialog.dismiss()


class NotebookPane:
    """An open notebook in the page."""

    def __init__(self, lab_page: LabPage, path: str) -> None:
        self._page, self.path = lab_page.page, path

    def wait_shown(self) -> None:
        """Wait until the notebook is open and connected to its kernel, which may be busy."""
        self._page.wait_for_function(_SHOWN, arg=self.path)

    def to_front(self) -> None:
        self._page.evaluate(_TO_FRONT, self.path)
        self.wait_in_front()

    def wait_in_front(self) -> None:
        self._page.wait_for_function(_IN_FRONT, arg=self.path)

    def in_front(self) -> bool:
        return bool(self._page.evaluate(_IN_FRONT, self.path))

    def start(self, index: int) -> None:
        """Run cell ``index`` without waiting for its end."""
        self.to_front()
        self._page.evaluate(_RUN, [self.path, index])

    def run(self, index: int) -> None:
        """Run cell ``index``, which must succeed."""
        self.start(index)
        self.wait_end(index)
        errors = [o for o in self.outputs(index) if o["output_type"] == "error"]
        assert not errors, f"{self.path}: {errors}"

    def edit(self, index: int) -> None:
        """Put the cursor into the cell."""
        self.to_front()
        self.cell(index).locator(".cm-content").click()

    def wait_end(self, index: int, timeout_ms: float = PATIENCE_MS) -> None:
        """Wait until the cell's prompt is a number again."""
        expect(self.cell(index).locator(".jp-InputPrompt")).to_have_text(
            re.compile(r"\[\d+\]:"), timeout=timeout_ms
        )

    def running(self, index: int) -> bool:
        return "*" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """Return the outputs that would be saved for cell ``index``."""
        found: list[dict[str, Any]] = self._page.evaluate(_OUTPUTS, [self.path, index])
        return found

    @property
    def root(self) -> Locator:
        return self._page.locator(f'[id="{self._page.evaluate(_DOM_ID, self.path)}"]')

    def cell(self, index: int) -> Locator:
        return self.root.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """Return the output area under the cell."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def waiting_line(self, index: int) -> Locator:
        return self.cell(index).locator('.jp-kiwiWaitLine [role="status"]')

    @property
    def marked_tab(self) -> Locator:
        """Return the notebook's tab if the tab is marked as waiting."""
        name = self.path.rpartition("/")[2]
        tabs = self._page.locator('.lm-DockPanel-tabBar .lm-TabBar-tab[data-kiwi="waiting"]')
        return tabs.filter(has_text=name)

    def toolbar(self, name: str) -> Locator:
        """Return a button of the toolbar: ``interrupt``, ``run`` …"""
        return self.root.locator(f'.jp-NotebookPanel-toolbar [data-jp-item-name="{name}"]')


class Panel:
    """Kiwi's sidebar, found by the ``data-kiwi`` attributes of its elements."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.root = page.locator('[data-kiwi="panel"]')

    def part(self, name: str) -> Locator:
        return self.root.locator(f'[data-kiwi="{name}"]')

    def unfolded(self) -> Panel:
        """Unfold what is below "Load, history, settings" in each card, and return the panel."""
        for part in self.part("more").all():
            if part.get_attribute("open") is None:
                part.locator("> summary").click()
        return self

    def spans(self, kind: str, session: str) -> Locator:
        return self.part("timeline").locator(
            f'[data-kiwi="span"][data-kind="{kind}"][data-session="{session}"]'
        )

    def resting(self, session: str) -> Locator:
        return self.root.locator(f'[data-kiwi="resting"][data-session="{session}"]')

    def queue_entry(self, session: str) -> Locator:
        return self.root.locator(f'[data-kiwi="queue-entry"][data-session="{session}"]')
