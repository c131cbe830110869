"""A program that computes on a GPU, with memory and work of a given size: what run_all.py runs.

    job.py hold   --bytes N                                 holds memory until a line comes in
    job.py ballast --bytes N                                holds memory until its input ends
    job.py driver|torch --bytes N (--rounds N | --calibrate S)
    job.py driver|torch --bytes N --rounds N --cells N [--kiwi]    like a notebook: see cells()
    job.py add|matmul --side N --rounds N                   nvshare's published test programs
    job.py train  --rounds N                                a training loop; prints its losses

The program prints JSON lines; the last one has the result. A round ends with a small copy to the
host, as a training loop's ``loss.item()`` does, not with a bare synchronise, which kills a program
that the driver has checkpointed (quirks.py measures it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES = 1 << 26
"""Size of the pieces in which contents are made and hashed: a host needs no RAM for all of it."""
HASHERS = 8


def check(result: Any) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code!r}")
    return values[0] if len(values) == 1 else values


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


class DriverWork:
    """A job with ``size`` bytes of random contents; a round copies a part to a scratch buffer."""

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self.cu = driver
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
        self.scratch_bytes = min(PIECE_BYTES, size // 4)
        self.size = size - self.scratch_bytes
        self.data = int(check(driver.cuMemAlloc(self.size)))
        self.scratch = int(check(driver.cuMemAlloc(self.scratch_bytes)))
        self.copied = 0
        noise = random.Random(7).randbytes(min(PIECE_BYTES, self.size) + len(self._pieces()))
        for number, (offset, length) in enumerate(self._pieces()):
            # Each piece is shifted by a byte, so no two pieces are the same.
            piece = noise[number : number + length]
            check(driver.cuMemcpyHtoD(self.data + offset, piece, length))

    def _pieces(self) -> list[tuple[int, int]]:
        starts = range(0, self.size, PIECE_BYTES)
        return [(start, min(PIECE_BYTES, self.size - start)) for start in starts]

    def round(self) -> None:
        """Copy about a gigabyte on a real GPU, so that Python's own time does not matter."""
        for _ in range(8):
            offset = (self.copied * self.scratch_bytes) % max(1, self.size - self.scratch_bytes)
            check(self.cu.cuMemcpyDtoD(self.scratch, self.data + offset, self.scratch_bytes))
            self.copied += 1
        check(self.cu.cuMemcpyDtoH(bytearray(16), self.scratch, 16))

    def digest(self) -> str:
        """Hash every byte."""
        whole = hashlib.sha256()
        with ThreadPoolExecutor(HASHERS) as pool:
            pieces = self._pieces()
            for start in range(0, len(pieces), HASHERS):  # bounded host memory
                for one in pool.map(self._hash, pieces[start : start + HASHERS]):
                    whole.update(one)
        return whole.hexdigest()

    def _hash(self, piece: tuple[int, int]) -> bytes:
        offset, length = piece
        device = check(self.cu.cuDeviceGet(0))
        check(self.cu.cuCtxSetCurrent(check(self.cu.cuDevicePrimaryCtxRetain(device))))
        back = bytearray(length)
        check(self.cu.cuMemcpyDtoH(back, self.data + offset, length))
        return hashlib.sha256(back).digest()


class TorchWork:
    """A job with random tensors made on the GPU, piece by piece; a round is eight matrix
    products."""

    SIDE = 8192

    def __init__(self, size: int) -> None:
        import torch

        self.torch = torch
        left = max(PIECE_BYTES, size - 3 * 2 * self.SIDE * self.SIDE)
        self.lengths = [min(1 << 30, left - at) for at in range(0, left, 1 << 30)]
        self.held = [self._made(number) for number in range(len(self.lengths))]
        torch.manual_seed(1)
        shape = (self.SIDE, self.SIDE)
        self.a = torch.randn(shape, dtype=torch.float16, device="cuda") / 100
        self.b = torch.randn(shape, dtype=torch.float16, device="cuda") / 100

    def _made(self, number: int) -> Any:
        torch = self.torch
        source = torch.Generator("cuda").manual_seed(number)
        length = self.lengths[number]
        return torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda", generator=source)

    def round(self) -> None:
        for _ in range(8):
            self.c = self.a @ self.b
        self.c[0, 0].item()

    def digest(self) -> str:
        """Compare every byte with its source; hash the product."""
        same = all(
            self.torch.equal(one, self._made(number)) for number, one in enumerate(self.held)
        )
        product = hashlib.sha256(self.c.cpu().numpy().tobytes()).hexdigest()
        return f"{same} {product}"


class Loop:
    """nvshare's published tests: an element-wise addition, or a matrix product, of float32."""

    def __init__(self, kind: str, side: int) -> None:
        import torch

        torch.manual_seed(3)
        self.x = torch.rand((side, side), device="cuda")
        self.y = torch.rand((side, side), device="cuda")
        self.operation = torch.add if kind == "add" else torch.matmul

    def round(self) -> None:
        self.z = self.operation(self.x, self.y)
        self.z[0, 0].item()

    def digest(self) -> str:
        return f"{self.z.double().sum().item():.17g}"


def train(rounds: int) -> dict[str, Any]:
    """Run a deterministic training: the same libraries on the same GPU give losses equal to the
    last bit."""
    step = training_step()
    losses = [step().hex() for _ in range(rounds)]
    return {"rounds": rounds, "losses": hashlib.sha256("".join(losses).encode()).hexdigest()}


def training_step(width: int = 2048, rows: int = 4096) -> Callable[[], float]:
    import os

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(rows, width, device="cuda")
    y = torch.roll(x, 1, dims=1)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def call_times(rounds: int) -> dict[str, float]:
    """Time PyTorch's calls one kind at a time, for zygote.py. Return the median of ``rounds`` runs
    of each, in seconds a call. Launches run ahead of the GPU, so their run is short and a wait
    follows, untimed."""
    import torch

    small, large = torch.zeros(64, device="cuda"), torch.zeros(1 << 24, device="cuda")
    host, event = torch.zeros(1 << 14), torch.cuda.Event()
    room = torch.zeros(1 << 14, device="cuda")
    kinds: dict[str, Callable[[], object]] = {
        "launch": lambda: small.add_(1),
        "launch over 64 MiB": lambda: large.add_(1),
        "item": small[0].item,
        "copy in": lambda: room.copy_(host),
        "event record": event.record,
        "event query": event.query,
        "synchronise": torch.cuda.synchronize,
    }
    found = {}
    for name, call in kinds.items():
        runs = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            for _ in range(100):
                call()
            runs.append((time.perf_counter() - began_s) / 100)
            torch.cuda.synchronize()
        found[name] = statistics.median(runs)
    return found


class Turns:
    """Leases, taken as by a notebook's cells; without ``--kiwi``, no leases."""

    def __init__(self, kiwi: bool) -> None:
        self.client: Any = None
        if not kiwi:
            return
        import os
        from pathlib import Path

        from kiwi_core.client import Client, discover

        path = discover(Path(os.environ["KIWI_SOCKET_DIR"]))[0]
        self.client = Client(path, name="job", cuda_library=lambda: "")
        self.client.connect()

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
    """Run two cells to set up (after which a scheduler knows what this program needs); another one
    after an input line (the first cells of others may have moved this memory out); and after a
    second line ``rounds`` in ``cells`` cells of equal length. Print a line before each wait for a
    line."""
    turns = Turns(args.kiwi)
    job = turns.cell(lambda: make(args.bytes))
    time.sleep(0.5)  # a person reads
    turns.cell(job.round)
    time.sleep(0.5)
    for _ in range(2):
        say(ready=True)
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
    """Compute for ``rounds``, or for ``calibrate`` seconds."""
    began_s = time.monotonic()
    job = make(args.bytes)
    ready_s = time.monotonic()
    say(ready=True)
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


def hold(args: argparse.Namespace) -> dict[str, Any]:
    job = DriverWork(args.bytes)
    say(bytes=args.bytes, digest=job.digest())
    sys.stdin.readline()
    return {"digest": job.digest()}


def ballast(args: argparse.Namespace) -> dict[str, Any]:
    """Hold memory without using it, as a program outside Kiwi."""
    from cuda.bindings import driver

    check(driver.cuInit(0))
    check(
        driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0)))))
    )
    check(driver.cuMemAlloc(args.bytes))
    say(bytes=args.bytes)
    sys.stdin.read()
    return {"bytes": args.bytes}


def _run(args: argparse.Namespace) -> dict[str, Any]:
    if args.kind in ("hold", "ballast"):
        return {"hold": hold, "ballast": ballast}[args.kind](args)
    if args.kind == "train":
        return train(args.rounds)
    if args.kind in ("add", "matmul"):
        return work(lambda _size: Loop(args.kind, args.side), args)
    make = DriverWork if args.kind == "driver" else TorchWork
    return cells(make, args) if args.cells else work(make, args)


KINDS = ("driver", "torch", "add", "matmul", "train", "hold", "ballast")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--bytes", type=int, default=1 << 26)
    parser.add_argument("--side", type=int, default=28_000)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--calibrate", type=float, default=3.0, metavar="S")
    parser.add_argument("--cells", type=int, default=0)
    parser.add_argument("--kiwi", action="store_true", help="take leases for the cells")
    args = parser.parse_args()
    # At its limit the program exits normally: on some drivers a restored process must not be
    # killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    said = _run(args)
    say(**said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
