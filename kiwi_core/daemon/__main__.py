"""``python -m kiwi_core.daemon UUID``: the daemon of one GPU. Started by the supervisor only, which
puts the options into the environment; the argument is for people who look at processes."""

# ruff: noqa: E402 - what comes before the imports speeds them up

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys

# Where rich is installed, structlog imports it for tracebacks that the daemon does not write: a
# fifth of the time that it takes to start.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

import msgspec
import structlog

from kiwi_core import clock
from kiwi_core import log as logs
from kiwi_core.daemon.base.machine import this_machine
from kiwi_core.daemon.base.tasks import endless
from kiwi_core.daemon.gpu_daemon import GpuDaemon
from kiwi_core.daemon.options import ENV_OPTIONS, ChildOptions
from kiwi_core.daemon.supervised import EXIT_CANNOT, EXIT_UNUSED
from kiwi_core.errors import NO_MORE, KiwiError

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that reads the usage file may keep the interpreter from the loop."""


def main() -> int:
    options = msgspec.json.decode(os.environ.pop(ENV_OPTIONS), type=ChildOptions)
    logs.configure(as_json=options.asked.log_json)
    log = structlog.get_logger(__name__)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        if options.restarted:
            options.keep_emulated_state()
        asyncio.run(_run(options))
    except KiwiError as error:
        log.error("cannot run", gpu=options.gpu_uuid, code=error.code, why=str(error))
        return EXIT_CANNOT
    return 0


async def _run(options: ChildOptions) -> None:
    """Run until SIGTERM, SIGINT, or the end of the supervisor (its pipe, our stdin, closes)."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_crash)
    # Timers and time-outs, too: after a pause they have as much time left as before.
    loop.time = clock.now_s  # type: ignore[method-assign]
    beat = endless(clock.DAEMON.beat(), "the clock")
    machine = await this_machine(options.gpu_uuid, options.asked.host_budget_bytes)
    daemon = GpuDaemon(options, machine)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)

    def supervisor_says() -> None:
        """Read what the supervisor has sent. Any byte means that the daemon may end if nobody needs
        it. The end of the stream means that the supervisor is gone."""
        if os.read(sys.stdin.fileno(), 64):
            daemon.end_if_unused()
            return
        loop.remove_reader(sys.stdin.fileno())
        structlog.get_logger(__name__).warning("supervisor is gone; leaving")
        daemon.stop()

    loop.add_reader(sys.stdin.fileno(), supervisor_says)
    await daemon.run()
    beat.cancel()
    # An operation that hangs keeps its task: do not wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_UNUSED if daemon.ended_unused else 0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: each session takes two descriptors, and the usual 1,024
    are for programs that use ``select``. The limits of sessions and connections follow from it."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _crash(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """End after an unexpected error, since state may be wrong. The supervisor starts a new daemon,
    which asks the driver about the state of each process."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_MORE:
        # Descriptors or memory ran out: keep serving those who are connected.
        structlog.get_logger(__name__).error(
            "the system has no more to give", what=context.get("message"), why=error.strerror
        )
        return
    structlog.get_logger(__name__).critical(
        "daemon crashed", what=context.get("message"),
        exc_info=error if isinstance(error, BaseException) else None,
    )  # fmt: skip
    sys.stderr.flush()
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
