"""A deterministic loop like a training loop, for suspensions.py to suspend at random.

    suspended_job.py KIND --bytes N               rounds until its input ends
    suspended_job.py KIND --bytes N --marks A,B   A rounds, then B rounds, and ends

KIND is driver, torch, expandable (PyTorch with expandable segments), cupy or jax.
A round ends with a copy to the host, as in ``loss.item()``; with ``--synchronise`` a bare wait for
the GPU follows. The program prints a JSON line when it is set up, and one at the end (at each
mark): rounds, a digest of every round's result and of the final state, and whether the ballast of N
bytes, which no round touches, is unchanged.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import itertools
import json
import os
import signal
import struct
import sys
import threading
import time
from typing import Any

from roundtrip_job import BALLASTS, check, said

WARM_ROUNDS = 3
BLOCK_BYTES = 1 << 16
DRIVER_BYTES = 1 << 24
SIDE = 2048
THINK_S = 0.02


class Driver:
    """A loop whose rounds write a block chosen by the last result, move it, and read it back."""

    def __init__(self, ballast: Any) -> None:
        self.cu = ballast.cu
        self.data = int(check(self.cu.cuMemAlloc(DRIVER_BYTES)))
        check(self.cu.cuMemsetD32(self.data, 0x6B697769, DRIVER_BYTES // 4))
        self.back = bytearray(BLOCK_BYTES)
        self.rounds = 0

    def round(self) -> bytes:
        block = hashlib.shake_128(bytes(self.back)).digest(BLOCK_BYTES)
        blocks = DRIVER_BYTES // BLOCK_BYTES
        start = self.rounds * 7 % blocks
        places = [self.data + (start + i * 11) % blocks * BLOCK_BYTES for i in range(4)]
        check(self.cu.cuMemcpyHtoD(places[0], block, BLOCK_BYTES))
        for source, target in itertools.pairwise(places):
            half = BLOCK_BYTES // 2
            check(self.cu.cuMemcpyDtoDAsync(target + half, source, half, 0))
        check(self.cu.cuMemcpyDtoH(self.back, places[-1], BLOCK_BYTES))
        self.rounds += 1
        return bytes(self.back)

    def synchronise(self) -> None:
        check(self.cu.cuCtxSynchronize())

    def state(self) -> bytes:
        whole = bytearray(DRIVER_BYTES)
        check(self.cu.cuMemcpyDtoH(whole, self.data, DRIVER_BYTES))
        return bytes(whole)


class Torch:
    def __init__(self, _ballast: Any) -> None:
        import torch
        from torch import nn

        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        self.torch = torch
        layers = (nn.Linear(SIDE, 2 * SIDE), nn.GELU(), nn.Linear(2 * SIDE, SIDE))
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(1024, SIDE, device="cuda")
        self.y = torch.roll(self.x, 1, dims=1)

    def round(self) -> bytes:
        self.optimizer.zero_grad()
        loss = self.torch.nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return struct.pack("<d", loss.item())

    def synchronise(self) -> None:
        self.torch.cuda.synchronize()

    def state(self) -> bytes:
        return b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())


class Cupy:
    def __init__(self, _ballast: Any) -> None:
        import cupy
        import numpy

        noise = numpy.random.default_rng(0)
        weights = noise.standard_normal((SIDE, SIDE), dtype=numpy.float32)
        self.cupy = cupy
        self.weights = cupy.asarray(weights) / numpy.float32(SIDE**0.5)
        self.x = cupy.asarray(noise.standard_normal((1024, SIDE), dtype=numpy.float32))

    def round(self) -> bytes:
        y = self.cupy.tanh(self.x @ self.weights)
        error = y - self.x
        self.weights -= 1e-3 * (self.x.T @ (error * (1 - y * y))) / len(self.x)
        return struct.pack("<d", float((error * error).mean().item()))

    def synchronise(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def state(self) -> bytes:
        found: bytes = self.cupy.asnumpy(self.weights).tobytes()
        return found


class Jax:
    def __init__(self, _ballast: Any) -> None:
        import jax
        import jax.numpy as jnp

        one, other = jax.random.split(jax.random.PRNGKey(0))
        self.jax = jax
        self.weights = jax.random.normal(one, (SIDE, SIDE)) / SIDE**0.5
        x = jax.random.normal(other, (1024, SIDE))

        def loss_of(weights: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ weights) - x) ** 2)

        gradient = jax.value_and_grad(loss_of)

        def step(weights: Any) -> Any:
            loss, slope = gradient(weights)
            return weights - slope, loss

        self.step = jax.jit(step)

    def round(self) -> bytes:
        self.weights, loss = self.step(self.weights)
        return struct.pack("<d", float(loss))

    def synchronise(self) -> None:
        self.weights.block_until_ready()

    def state(self) -> bytes:
        found: bytes = self.jax.device_get(self.weights).tobytes()
        return found


LOOPS: dict[str, type[Any]] = {
    "driver": Driver, "torch": Torch, "expandable": Torch, "cupy": Cupy, "jax": Jax,
}  # fmt: skip


class Reading(threading.Thread):
    """Reads NVML every second, as programs do that watch the GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._began_s: float | None = None
        self._longest_s = 0.0
        self.start()

    def run(self) -> None:
        while True:
            self._began_s = time.monotonic()
            self._nvml.nvmlDeviceGetMemoryInfo(self._device)
            self._longest_s, self._began_s = self.longest_s(), None
            time.sleep(1.0)

    def longest_s(self) -> float:
        """Return how long the longest call took, one that is under way included."""
        began_s = self._began_s
        under_way_s = 0.0 if began_s is None else time.monotonic() - began_s
        return round(max(self._longest_s, under_way_s), 3)


class Run:
    """The rounds of a loop, hashed as they come."""

    def __init__(self, kind: str, size: int, synchronise: bool, nvml: bool) -> None:
        self.ballast = BALLASTS["torch" if kind == "expandable" else kind](size)
        self.reading = Reading() if nvml else None
        self.ballast_was = said(self.ballast)["digest"]
        self.loop = LOOPS[kind](self.ballast)
        self.synchronise = synchronise
        self.results = hashlib.blake2b()
        self.rounds = 0
        for _ in range(WARM_ROUNDS):
            self.round()

    def round(self) -> None:
        self.results.update(self.loop.round())
        if self.synchronise:
            time.sleep(
                THINK_S
            )  # so that most suspensions come before the wait, not before the copy
            self.loop.synchronise()
        self.rounds += 1

    def say(self) -> None:
        digest = self.results.copy()
        digest.update(self.loop.state())
        same = said(self.ballast)["digest"] == self.ballast_was
        line: dict[str, Any] = {
            "rounds": self.rounds,
            "digest": digest.hexdigest(),
            "ballast_same": same,
        }
        if self.reading is not None:
            line["longest_nvml_s"] = self.reading.longest_s()
        print(json.dumps(line), flush=True)


def _run_until_input_ends(run: Run, pace_s: float) -> None:
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    while not stop.is_set():
        run.round()
        time.sleep(pace_s)
    run.say()


def _to_marks(run: Run, marks: list[int]) -> None:
    for mark in sorted(marks):
        while run.rounds < mark:
            run.round()
        run.say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=sorted(LOOPS))
    parser.add_argument("--bytes", type=int, default=1 << 24)
    parser.add_argument("--marks", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="rest after a round")
    parser.add_argument("--synchronise", action="store_true")
    parser.add_argument("--nvml", action="store_true", help="read NVML every second")
    args = parser.parse_args()
    # The same bits each time: no kernel is chosen by measuring, no workspace by chance.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["JAX_PLATFORMS"] = "cuda"  # otherwise JAX would silently use the CPU
    if args.kind == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    faulthandler.register(signal.SIGUSR1)  # shows where a job hangs
    # A program that is over its limit exits normally: on some drivers a restored process must not
    # be killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(args.kind, args.bytes, args.synchronise, args.nvml)
    print(json.dumps({"ready": True}), flush=True)
    if args.marks:
        _to_marks(run, args.marks)
    else:
        _run_until_input_ends(run, args.pace)


if __name__ == "__main__":
    main()
