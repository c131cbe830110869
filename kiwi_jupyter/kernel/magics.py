"""``%kiwi`` and ``%%kiwi``."""

from __future__ import annotations

import ast
import difflib
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from IPython.core.magic import Magics, line_cell_magic, magics_class

from kiwi_core.errors import KiwiError
from kiwi_core.wire.words import counted_text
from kiwi_jupyter.kernel.status_view import StatusView

if TYPE_CHECKING:
    from kiwi_core.wire.messages import GpuStatus
    from kiwi_jupyter.kernel.extension import Extension

HELP: Final = """\
Kiwi shares the GPU between notebooks. Cells that use the GPU wait for their turn by themselves.

  %kiwi status      this notebook, who has the GPU, who waits and for how long
  %kiwi why         why the last cell did (not) wait for the GPU
  %kiwi why CODE    the same for a line of code, without running it
  %kiwi release     move this notebook's GPU memory out now, so that others have the room
  %kiwi off, on     switch Kiwi off and on in this kernel
  %kiwi help        this text

  %%kiwi cpu        first line of a cell: it does not use the GPU, run it at once
  %%kiwi gpu        first line of a cell: it does use the GPU, wait for it first
"""

KEPT_BY_ERROR: Final = (
    "The traceback of the last error keeps the variables of the functions that failed, and may keep"
    " GPU memory with them: `import sys; sys.last_traceback = sys.last_value = sys.last_exc = None`"
    " lets them go."
)


@magics_class
class KiwiMagics(Magics):  # type: ignore[misc]
    """The magics. ``extension`` is read at each call: everything works without a daemon, too."""

    def __init__(self, shell: Any, extension: Extension) -> None:
        super().__init__(shell)
        self._extension = extension

    @line_cell_magic  # type: ignore[untyped-decorator]
    def kiwi(self, line: str, cell: str | None = None) -> Any:
        """Kiwi: sharing the GPU with other notebooks. `%kiwi help` shows what there is."""
        if cell is not None:
            return self._cell(line.strip(), cell)
        word, _, rest = line.strip().partition(" ")
        commands = {
            "": self._help,
            "status": self._status,
            "why": self._why,
            "release": self._release,
            "off": self._off,
            "on": self._on,
            "help": self._help,
        }
        command = commands.get(word)
        if command is None:
            print(_unknown(word, [name for name in commands if name]))  # noqa: T201
            return None
        return command(rest.strip())

    def _cell(self, word: str, cell: str) -> None:
        """Answer where the first line was not rewritten: an unknown word, or a direct call."""
        if word in ("cpu", "gpu"):
            self.shell.run_cell(f"%%kiwi {word}\n{cell}")
        else:
            print(_unknown(word, ["cpu", "gpu"], cell=True))  # noqa: T201

    def _help(self, _rest: str) -> None:
        print(HELP)  # noqa: T201

    # --- looking

    def _status(self, _rest: str) -> StatusView:
        status, problem = self._ask()
        session = self._extension.session
        client = session.connected_client
        mine = client.welcome.session if client is not None and client.welcome else ""
        return StatusView(
            status,
            mine=mine,
            problem=problem,
            enabled=self._extension.config.enabled,
            notices=list(session.notices.kept),
        )

    def _ask(self) -> tuple[GpuStatus | None, str]:
        session = self._extension.session
        try:
            client = session.connected_client
            if client is not None:
                return client.status(), ""
            return session.look(), ""
        except KiwiError as error:
            return None, str(error)

    def _why(self, code: str) -> None:
        hook = self._extension.cell_hook
        if not code:
            forecast = hook.last_forecast
            if forecast is None:
                print("Kiwi has not looked at a cell yet (no daemon, no GPU, or off).")  # noqa: T201
                return
            self._say_why("The last cell", forecast.gpu, forecast.why)
            self._say_need()
            return
        try:
            tree = ast.parse(self.shell.transform_cell(code))
        except SyntaxError as error:
            print(f"That is not Python: {error.msg}")  # noqa: T201
            return
        forecast = hook.judge(tree)
        self._say_why(f"`{code}`", forecast.gpu, forecast.why)

    def _say_why(self, what: str, gpu: bool, why: str) -> None:
        says = "takes its turn before it runs" if gpu else "runs at once"
        print(f"{what} {says}: {why}.")  # noqa: T201

    def _say_need(self) -> None:
        """Say with how much memory this notebook counts, what may keep its memory, and why the
        driver moves it where Kiwi's library was asked to."""
        session = self._extension.session
        client = session.connected_client
        if client is None or client.welcome is None:
            return
        try:
            sessions = client.status().sessions
        except KiwiError:
            return
        own = next((one for one in sessions if one.id == client.welcome.session), None)
        if own is None:
            return
        if counted := counted_text(own):
            print(f"This notebook is {counted}.")  # noqa: T201
        if (own.resident_bytes or own.paged_out_bytes) and last_error_keeps_variables():
            print(KEPT_BY_ERROR)  # noqa: T201
        if own.pager_text:
            print(own.pager_text)  # noqa: T201

    # --- doing

    def _release(self, _rest: str) -> None:
        client = self._extension.session.connected_client
        if client is None:
            print("This notebook has not used the GPU under Kiwi: there is nothing to release.")  # noqa: T201
            return
        self._extension.burst.end_now()
        try:
            client.release()
        except KiwiError as error:
            print(f"Kiwi: {error}")  # noqa: T201
            return
        print(  # noqa: T201
            "This notebook's GPU memory is being moved out; it comes back by itself with the next"
            " cell that uses the GPU."
        )

    def _off(self, _rest: str) -> None:
        self._extension.switch_off()
        print(  # noqa: T201
            "Kiwi is off in this kernel: cells run at once, and this notebook's GPU memory stays"
            " in the GPU. `%kiwi on` switches it on again."
        )

    def _on(self, _rest: str) -> None:
        self._extension.switch_on()
        print("Kiwi is on in this kernel.")  # noqa: T201


def last_error_keeps_variables() -> bool:
    """Return whether the traceback of the last error has a function's frame. (Those of IPython and
    Kiwi do not count, and the variables of a cell itself are the notebook's.)"""
    errors = (getattr(sys, name, None) for name in ("last_exc", "last_value"))
    frames = [
        frame
        for error in errors
        for frame, _ in traceback.walk_tb(getattr(error, "__traceback__", None))
    ]
    return any(
        frame.f_locals is not frame.f_globals
        and frame.f_globals.get("__name__", "").partition(".")[0] not in ("IPython", "kiwi_jupyter")
        for frame in frames
    )


def _unknown(word: str, known: list[str], *, cell: bool = False) -> str:
    sign = "%%" if cell else "%"
    near = difflib.get_close_matches(word, known, 1)
    hint = f" Did you mean `{sign}kiwi {near[0]}`?" if near else ""
    return f"There is no `{sign}kiwi {word}`.{hint}\n\n{HELP}"
