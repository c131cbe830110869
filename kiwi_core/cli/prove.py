"""``kiwi doctor --prove``: let each GPU prove that Kiwi's library moves memory here."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import kiwi_emulator as emulator
from kiwi_core.bench import proof as proving
from kiwi_core.cli import exits
from kiwi_core.cli.checks.finding import Finding, Level, fail, ok, warn
from kiwi_core.client import Client
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.gpu import nvml, proofs
from kiwi_core.units import format_bytes
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.proofs import Proof

AREA = "proof"


def prove(show: Callable[[Finding], None], emulate: str | None, sockets: Path) -> int:
    """Let each GPU prove itself, show what came out, and keep it. ``emulate``: emulated GPUs of
    these sizes instead. Raise ``KiwiError`` if there is no GPU, or somebody computes there by what
    the daemons in ``sockets`` say."""
    with ExitStack() as stack:
        if emulate is not None:
            _emulate(emulate, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        found = nvml.gpus()
        if not found:
            raise CallerError("no-gpu", "There is no NVIDIA GPU on this machine.")
        for gpu in found:
            _must_be_idle(sockets / f"{gpu.uuid}.sock", gpu)
        code = exits.OK
        for gpu in found:
            try:
                with proofs.one_at_a_time():
                    proof = proving.prove(
                        gpu, lambda name: print(f"  {name} …", file=sys.stderr, flush=True)
                    )
                    proofs.save(proof)
            except (KiwiError, OSError) as error:
                remedy = getattr(error, "remedy", "")
                finding = warn(
                    AREA,
                    f"GPU {gpu.index} ({gpu.name}): nothing was proven: {error}",
                    remedy or "Is the cache directory writable, and the disk full?",
                )
            else:
                finding = _judged(gpu, proof)
            show(finding)
            if finding.level is Level.FAIL:
                code = exits.FAILED
    return code


def _must_be_idle(socket: Path, gpu: GpuInfo) -> None:
    """Raise ``CallerError`` if a daemon says that somebody has this GPU or waits for it: both would
    be in each other's way."""
    client = Client(socket, role=Role.OBSERVER, reconnect=False)
    try:
        client.connect()
        status = client.status()
    except KiwiError:
        return
    finally:
        client.close()
    if status.holders or status.queue:
        raise CallerError(
            "gpu-in-use",
            f"GPU {gpu.index} is in use (kiwi status), and a proof would be in the way.",
            "Wait until nobody computes. The daemon proves its GPU by itself in an idle moment.",
        )


def _emulate(sizes: str, directory: Path) -> None:
    try:
        specs, libraries = emulator.parse_gpus(sizes), emulator.build()
    except (ValueError, RuntimeError) as error:
        raise CallerError("emulator", str(error)) from error
    state = directory / "emulated-gpus"
    emulator.create_state(state, specs)
    emulator.activate(state, libraries)
    os.environ.update(emulator.environment(state, libraries))


def _judged(gpu: GpuInfo, proof: Proof) -> Finding:
    about = f"GPU {gpu.index} ({gpu.name}, driver {proof.driver})"
    if not proof.passed:
        after = f" after {', '.join(proof.checks)}" if proof.checks else ""
        return fail(
            AREA,
            f"{about}: {proof.failed} This was found{after}.",
            "Programs here leave their memory to the driver, which is slower. Please report this.",
        )
    speeds = (
        f"{format_bytes(int(one))}/s" for one in (proof.out_bytes_per_s, proof.in_bytes_per_s)
    )
    out, back = speeds
    return ok(AREA, f"{about}: memory moves by each program's own library, {out} out, {back} in")
