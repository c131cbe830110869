"""A program that computes on a GPU, with memory and work of a given size: what run_all.py runs.

    job.py driver --bytes N (--rounds N | --calibrate S)    plain driver calls, also emulated
    job.py torch  --bytes N (--rounds N | --calibrate S)    matrix products
    job.py train  --rounds N                                a training loop; prints its losses
    job.py hold   --bytes N                                 holds memory until standard input ends
    job.py driver|torch --bytes N --rounds N --cells N [--kiwi]   like a notebook: see cells()

Prints one JSON line when it is done (``hold``: when it is ready).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

EDGE_BYTES = 1 << 22
"""Read back for the digest at either end: all of it would measure the host."""


def check(result: Any) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code!r}")
    return values[0] if len(values) == 1 else values


class DriverWork:
    """Holds ``size`` bytes with a pattern; a round copies a part of it over a scratch buffer."""

    SCRATCH = 1 << 26

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self.cu = driver
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
        self.scratch_bytes = min(self.SCRATCH, size // 4)
        self.size = size - self.scratch_bytes
        self.data = int(check(driver.cuMemAlloc(self.size)))
        self.scratch = int(check(driver.cuMemAlloc(self.scratch_bytes)))
        words = self.size // 4
        check(driver.cuMemsetD32(self.data, 0x6B697769, words))
        edge = bytes(range(256)) * (min(EDGE_BYTES, self.size // 2) // 256)
        for offset in (0, self.size - len(edge)):
            check(driver.cuMemcpyHtoD(self.data + offset, edge, len(edge)))
        self.edge_bytes = len(edge)
        self.copied = 0

    def round(self) -> None:
        """About a gigabyte each on a real GPU: long enough that Python costs nothing."""
        for _ in range(8):
            offset = (self.copied * self.scratch_bytes) % max(1, self.size - self.scratch_bytes)
            check(self.cu.cuMemcpyDtoD(self.scratch, self.data + offset, self.scratch_bytes))
            self.copied += 1
        check(self.cu.cuCtxSynchronize())

    def digest(self) -> str:
        back = bytearray(self.edge_bytes)
        found = hashlib.sha256()
        for offset in (0, self.size - self.edge_bytes):
            check(self.cu.cuMemcpyDtoH(back, self.data + offset, self.edge_bytes))
            found.update(back)
        return found.hexdigest()


class TorchWork:
    def __init__(self, size: int) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(1)
        side = 8192
        self.held = torch.full((max(1, size - 3 * 2 * side * side),), 7, dtype=torch.uint8).cuda()
        self.a = torch.randn(side, side, dtype=torch.float16, device="cuda") / 100
        self.b = torch.randn(side, side, dtype=torch.float16, device="cuda") / 100

    def round(self) -> None:
        for _ in range(8):
            self.c = self.a @ self.b
        self.torch.cuda.synchronize()

    def digest(self) -> str:
        total = int(self.held.sum(dtype=self.torch.int64).item()) == 7 * self.held.numel()
        return f"{total} {self.c.float().sum().item():.6e}"


def train(rounds: int) -> dict[str, Any]:
    """Deterministic: with the same libraries on the same GPU, losses are equal to the last bit."""
    import os

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4096, 2048, device="cuda")
    y = torch.roll(x, 1, dims=1)
    losses = []
    for _ in range(rounds):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return {"rounds": rounds, "losses": losses}


class Turns:
    """Leases, taken as a notebook's cells take them; without ``--kiwi``, nothing."""

    def __init__(self, kiwi: bool) -> None:
        self.client: Any = None
        if not kiwi:
            return
        import os
        from pathlib import Path

        from kiwi_core import emulator
        from kiwi_core.client import Client, discover

        path = discover(Path(os.environ["KIWI_SOCKET_DIR"]))[0]
        self.client = Client(path, name="job", cuda_library=lambda: "")
        emulation = self.client.connect().emulation
        if emulation is not None:
            os.environ.update(emulation.env)
            emulator.load(emulation.libcuda, emulation.libnvml)

    def cell(self, run: Callable[[], Any]) -> Any:
        if self.client is None:
            return run()
        self.client.acquire()
        try:
            return run()
        finally:
            self.client.end_burst()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def cells(make: Callable[[int], Any], args: argparse.Namespace) -> dict[str, Any]:
    """Two cells to set up (after them a scheduler knows what this program needs); one more when a
    line has come in (others' first cells may have moved this memory out); and at a second line
    ``rounds`` in ``cells`` cells of equal length. Prints a line whenever it waits for one."""
    turns = Turns(args.kiwi)
    job = turns.cell(lambda: make(args.bytes))
    time.sleep(0.5)  # a person reads
    turns.cell(job.round)
    time.sleep(0.5)
    for _ in range(2):
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        turns.cell(job.round)
    began_s = time.monotonic()
    for _ in range(args.cells):
        turns.cell(lambda: [job.round() for _ in range(max(1, args.rounds // args.cells))])
    ended_s = time.monotonic()
    digest = turns.cell(job.digest)
    turns.close()
    return {"began_s": began_s, "ended_s": ended_s, "digest": digest}


def work(make: Callable[[int], Any], args: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    job = make(args.bytes)
    ready_s = time.monotonic()
    rounds = 0
    slowest_s = 0.0
    last_s = ready_s
    while rounds < args.rounds if args.rounds else last_s < ready_s + args.calibrate:
        job.round()
        rounds += 1
        now_s = time.monotonic()
        slowest_s, last_s = max(slowest_s, now_s - last_s), now_s
    return {
        "rounds": rounds,
        "began_s": began_s,
        "ready_s": ready_s,
        "ended_s": last_s,
        "slowest_round_s": round(slowest_s, 4),
        "digest": job.digest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("driver", "torch", "train", "hold"))
    parser.add_argument("--bytes", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--calibrate", type=float, default=3.0, metavar="S")
    parser.add_argument("--cells", type=int, default=0)
    parser.add_argument("--kiwi", action="store_true", help="take leases for the cells")
    args = parser.parse_args()
    if args.kind == "hold":
        job = DriverWork(args.bytes)
        print(json.dumps({"bytes": args.bytes, "digest": job.digest()}), flush=True)
        sys.stdin.readline()
        print(json.dumps({"digest": job.digest()}), flush=True)
        return 0
    if args.kind == "train":
        said = train(args.rounds)
    else:
        make = DriverWork if args.kind == "driver" else TorchWork
        said = cells(make, args) if args.cells else work(make, args)
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
