"""``kiwi doctor``: check whether this machine is fit for Kiwi, and say what to do if not."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.cli import admin_files, exits
from kiwi_core.cli.checks.finding import Finding, Level, fail
from kiwi_core.cli.common import add_socket_dir, directory_of
from kiwi_core.cli.terminal import Style, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kiwi_core.gpu.nvml import GpuInfo

DESCRIPTION = "Looks at this machine and says, line by line, whether Kiwi can work on it."
EPILOG = """\
Each line is OK, WARN (works, but something is missing or could be better) or FAIL (Kiwi cannot
work until it is fixed), with its remedy below. Nothing on the machine is changed.

exit codes: 0 no line is FAIL, 1 at least one is.

JSON: {"fit": true|false, "findings": [{"level": "ok|warn|fail", "area", "text", "remedy"}...]}

examples:
  kiwi doctor
  kiwi doctor --json | jq '.findings[] | select(.level != "ok")'
  kiwi doctor --prove            whether Kiwi's own library may move memory here
  kiwi doctor --print systemd    the unit for /etc/systemd/system/kiwi.service
  kiwi doctor --print grafana    the dashboard for Kiwi's metrics
  kiwi doctor --print cdi        the device for /etc/cdi/kiwi.json that lets containers share
"""

AREA_TIMEOUT_S: Final = 45.0
"""The driver takes up to 3 s to start on big machines, IPython's configuration takes a few; a call
that takes longer than all that counts as hung."""


_DRIVER_HANGS: Final = (
    "The driver hangs: look at dmesg; usually only a restart of the machine helps."
)
_HANGS: Final = dict.fromkeys(("driver", "NVML"), _DRIVER_HANGS)
_ELSE_HANGS: Final = (
    "A file system or a process that was asked does not answer: look at dmesg, and whether all "
    "network mounts are there (df)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--print",
        choices=admin_files.FILES,
        help="print a file for administrators instead: the systemd unit, the Grafana dashboard, "
        "the CDI device",
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="let the GPUs prove instead, for up to a minute each and in free memory only, that "
        "Kiwi's library moves memory here without losing a byte; where they do, it becomes the "
        "default",
    )
    parser.add_argument(
        "--emulate",
        metavar="NxSIZE",
        help="with --prove: emulated GPUs, for example 1x512MiB; this proves the library only",
    )
    add_socket_dir(parser)


def run(args: argparse.Namespace) -> int:
    if args.prove:
        from kiwi_core.cli.prove import prove

        style = Style.of(sys.stdout)
        return prove(
            lambda one: print("\n".join(lines_of(one, style)), flush=True),
            args.emulate,
            directory_of(args),
        )
    if args.print is not None:
        print(admin_files.read(args.print), end="")
        return exits.OK
    findings = examine(directory_of(args))
    if args.json:
        found = list(findings)
        print(to_json(found))
    else:
        style = Style.of(sys.stdout)
        found = []
        for finding in findings:  # print each at once: some take a second
            found.append(finding)
            print("\n".join(lines_of(finding, style)), flush=True)
        print(_verdict(found, style))
    return exits.OK if _fit(found) else exits.FAILED


def examine(sockets: Path) -> Iterator[Finding]:
    """Check every area, one after the other. One that hangs or breaks becomes a finding."""
    from kiwi_core.cli.checks import (
        gpu,
        jupyter,
        killers,
        kubernetes,
        machine,
        memory,
        notebook,
        preload,
    )
    from kiwi_core.cli.checks import sockets as socket_checks

    gpus: list[GpuInfo] = []

    def list_gpus() -> Iterator[Finding]:
        found, findings = gpu.gpus()
        gpus.extend(found)
        return iter(findings)

    state = config.state_dir(sockets)
    yield from _within("machine", machine.check)
    yield from _within("driver", gpu.check)
    yield from _within("NVML", list_gpus)
    yield from _within("module", killers.check)
    yield from _within("memory", lambda: memory.check(gpus, [sockets, state]))
    yield from _within("sockets", lambda: socket_checks.check(sockets))
    yield from _within("Kubernetes", kubernetes.check)
    yield from _within("notebook", notebook.check)
    yield from _within("server", jupyter.check)
    yield from _within("pager", preload.check)
    yield gpu.compiler()


def _within(area: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run ``check`` in a thread: a driver that hangs cannot be interrupted, only left alone."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.extend(check())
        except OSError as error:
            what = error.filename or "What Kiwi has to look at"
            text = f"{what} cannot be looked at: {error.strerror or error}."
            findings.append(fail(area, text, "Mend its permissions or its file system."))
        except Exception as error:  # noqa: BLE001  (one broken check must not hide the others)
            remedy = getattr(error, "remedy", "") or "This is unexpected: please report it."
            findings.append(fail(area, f"{type(error).__name__}: {error}", remedy))

    thread = threading.Thread(target=work, name=f"doctor {area}", daemon=True)
    thread.start()
    thread.join(AREA_TIMEOUT_S)
    if thread.is_alive():
        text = f"No answer within {AREA_TIMEOUT_S:.0f} s."
        return [*findings, fail(area, text, _HANGS.get(area, _ELSE_HANGS))]
    return findings


def lines_of(finding: Finding, style: Style) -> list[str]:
    paint = {Level.OK: style.green, Level.WARN: style.yellow, Level.FAIL: style.red}[finding.level]
    label = paint(finding.level.name.ljust(4))
    lines = [f"{label}  {finding.area.ljust(10)}  {printable(finding.text)}"]
    if finding.remedy:
        lines.append(f"{' ' * 18}→ {printable(finding.remedy)}")
    return lines


def to_json(findings: list[Finding]) -> str:
    import msgspec

    data = msgspec.json.encode({"fit": _fit(findings), "findings": findings})
    return msgspec.json.format(data, indent=2).decode()


def _fit(findings: list[Finding]) -> bool:
    return all(finding.level is not Level.FAIL for finding in findings)


def _verdict(findings: list[Finding], style: Style) -> str:
    fails = sum(finding.level is Level.FAIL for finding in findings)
    warns = sum(finding.level is Level.WARN for finding in findings)
    if fails:
        return style.red(f"\nNot fit yet: {fails} to fix, {warns} to look at.")
    if warns:
        return style.yellow(f"\nFit, with {warns} to look at.")
    return style.green("\nFit.")
