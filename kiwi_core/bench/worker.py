"""``python -m kiwi_core.bench.worker ROLE``: one process that works for the bench.

It reads orders as JSON lines, ``{"call": name, "args": {...}}``, and answers each with ``{"value":
...}`` or ``{"error": {"code", "message", "remedy"}}``. When its input ends, the conductor is done
or dead: the worker then frees what it has, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, Final

from kiwi_core.errors import KiwiError

ROLES: Final = {
    "bus": "kiwi_core.bench.work.bus:Bus",
    "look": "kiwi_core.bench.work.look:Look",
    "session": "kiwi_core.bench.work.session:BenchSession",
    "proving": "kiwi_core.bench.work.proving:ProvingProgram",
    "echo": "kiwi_core.bench.work.echo:Echo",
    "stage": "kiwi_core.bench.work.stage:Stage",
}
"""The class of each role. Its ``close`` frees everything, also after errors. That may take
``ENDS_WITHIN_S``; then the process ends without it. In a process that is suspended or paged out,
driver calls wait, and nobody may be left to bring it back."""


def main() -> int:
    # Ctrl-C is for the conductor, which closes its workers in the right order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not look like an answer
    module, _, name = ROLES[sys.argv[1]].partition(":")
    role = getattr(import_module(module), name)()
    try:
        for line in sys.stdin:
            print(json.dumps(_obey(role, json.loads(line))), file=answers, flush=True)
    except BrokenPipeError:
        pass  # nobody reads any more
    finally:
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(role.ENDS_WITHIN_S, exit=True, file=nowhere)
            role.close()
    os._exit(0)  # a thread that hangs in the driver must not keep the process


def _obey(role: object, order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": getattr(role, order["call"])(**order["args"])}
    except KiwiError as error:
        said = {"code": error.code, "message": error.message, "remedy": error.remedy}
    except Exception as error:  # noqa: BLE001 - told to the conductor, which tells the user
        said = {"code": "worker", "message": f"{type(error).__name__}: {error}", "remedy": ""}
    return {"error": said}


if __name__ == "__main__":
    sys.exit(main())
