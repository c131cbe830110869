"""A program that holds GPU memory of one library and hashes it, for roundtrip.py to move.

    roundtrip_job.py driver|torch|cupy|jax --bytes N

The program prints a JSON line at once, and another after each line of its input: the digest of
every byte that it holds, and the addresses. The line "change" changes a byte first, to test the
comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 1 << 26
"""Bytes copied to the host at a time, so that the program's host memory stays small."""


class Ballast(Protocol):
    def pieces(self) -> Iterator[Any]:
        """Yield every byte that is held, in order, copied to host memory."""
        ...

    def addresses(self) -> list[int]: ...


def check(result: Any) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code!r}")
    return values[0] if len(values) == 1 else values


class OfDriver:
    """Two allocations of noise, by plain driver calls."""

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self.cu = driver
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
        first = size // 3 // 4096 * 4096
        self.parts = [(int(check(driver.cuMemAlloc(n))), n) for n in (first, size - first)]
        block = random.Random(5).randbytes(PIECE_BYTES + 4097)
        for number, (address, length) in enumerate(self._spans()):
            shift = (number * 61) % 4096
            check(driver.cuMemcpyHtoD(address, block[shift : shift + length], length))

    def _spans(self) -> Iterator[tuple[int, int]]:
        for base, size in self.parts:
            for offset in range(0, size, PIECE_BYTES):
                yield base + offset, min(PIECE_BYTES, size - offset)

    def change(self) -> None:
        address, size = self.parts[1]
        byte = bytearray(1)
        check(self.cu.cuMemcpyDtoH(byte, address + size // 2, 1))
        check(self.cu.cuMemsetD8(address + size // 2, byte[0] ^ 1, 1))

    def pieces(self) -> Iterator[Any]:
        back = bytearray(PIECE_BYTES)
        for address, length in self._spans():
            piece = memoryview(back)[:length]
            check(self.cu.cuMemcpyDtoH(piece, address, length))
            yield piece

    def addresses(self) -> list[int]:
        return [address for address, _ in self.parts]


class OfTorch:
    def __init__(self, size: int) -> None:
        import torch

        torch.manual_seed(5)
        self.tensors = [
            torch.randn(size // 2 // 4, device="cuda"),
            torch.randint(0, 256, (size // 4,), dtype=torch.uint8, device="cuda"),
            torch.randn(size // 4 // 2 + 1, device="cuda", dtype=torch.bfloat16),
        ]
        self.torch = torch

    def pieces(self) -> Iterator[Any]:
        for tensor in self.tensors:
            for piece in tensor.view(self.torch.uint8).split(PIECE_BYTES):
                yield piece.cpu().numpy().data

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]


class OfCupy:
    def __init__(self, size: int) -> None:
        import cupy
        import numpy

        noise = numpy.random.default_rng(5)  # random numbers on the GPU need one more library
        self.cupy = cupy
        self.arrays = [
            cupy.asarray(noise.standard_normal(size // 2 // 4, dtype=numpy.float32)),
            cupy.asarray(noise.integers(0, 256, size // 2 + 1, dtype=numpy.uint8)),
        ]

    def pieces(self) -> Iterator[Any]:
        for array in self.arrays:
            flat = array.view(self.cupy.uint8)
            for offset in range(0, flat.size, PIECE_BYTES):
                yield self.cupy.asnumpy(flat[offset : offset + PIECE_BYTES]).data

    def addresses(self) -> list[int]:
        return [int(array.data.ptr) for array in self.arrays]


class OfJax:
    def __init__(self, size: int) -> None:
        import jax

        one, other = jax.random.split(jax.random.PRNGKey(5))
        self.jax = jax
        self.arrays = [
            jax.random.normal(one, (size // 2 // 4,)),
            jax.random.bits(other, (size // 2 // 4 + 1,), dtype="uint32"),
        ]
        for array in self.arrays:
            array.block_until_ready()

    def pieces(self) -> Iterator[Any]:
        step = PIECE_BYTES // 4
        for array in self.arrays:
            for offset in range(0, array.size, step):
                piece = self.jax.device_get(array[offset : offset + step])
                yield piece.view("uint8").data

    def addresses(self) -> list[int]:
        return [int(array.unsafe_buffer_pointer()) for array in self.arrays]


BALLASTS: dict[str, type[Any]] = {
    "driver": OfDriver, "torch": OfTorch, "cupy": OfCupy, "jax": OfJax,
}  # fmt: skip


def said(ballast: Ballast) -> dict[str, Any]:
    digest, size = hashlib.blake2b(), 0
    for piece in ballast.pieces():
        digest.update(piece)
        size += len(piece)
    return {"digest": digest.hexdigest(), "bytes": size, "addresses": ballast.addresses()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", choices=sorted(BALLASTS))
    parser.add_argument("--bytes", type=int, required=True)
    args = parser.parse_args()
    ballast = BALLASTS[args.library](args.bytes)
    print(json.dumps(said(ballast)), flush=True)
    for line in sys.stdin:
        if line.strip() == "change":
            ballast.change()
        print(json.dumps(said(ballast)), flush=True)


if __name__ == "__main__":
    main()
