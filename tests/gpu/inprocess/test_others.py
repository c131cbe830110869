"""Tests of plain driver calls, CuPy and JAX under the in-process pager: to the bit as without Kiwi.

Run with ``pytest -m gpu tests/gpu/inprocess``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from driver_program import CHECKSUMS

if TYPE_CHECKING:
    from crowded_gpu import CrowdedGpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def same(crowded: CrowdedGpu, source: str, **env: str) -> None:
    alone, beside = crowded.alone(source, **env), crowded.crowded(source, **env)
    assert alone["right"]
    assert beside == alone


def test_driver_calls(crowded: CrowdedGpu) -> None:
    same(crowded, CHECKSUMS)


CUPY = """
import hashlib
import cupy
cupy.random.seed(7)
# Made where it stays: random bytes would be drawn as words first, which have no room.
ballast = cupy.random.random_sample(BALLAST_BYTES // 8).view(cupy.uint8)
def sums():
    return cupy.asnumpy(ballast.reshape(-1, 1 << 20).sum(1, dtype=cupy.uint64))
before = sums()
a = cupy.random.standard_normal((512, 512), dtype=cupy.float32)
square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x - 1", "square_less_one")
stream = cupy.cuda.Stream(non_blocking=True)
b = a
for step in range(250):
    b = cupy.tanh(square(a) + b * 0.5)
    with stream:
        held = cupy.full((step + 1) * 1000, step, dtype=cupy.int32)
    stream.synchronize()
    assert int(held.sum()) == step * (step + 1) * 1000
    if step % 25 == 0:
        del held
        cupy.get_default_memory_pool().free_all_blocks()
    pace()
right = bool((sums() == before).all())
say(right=right, digest=hashlib.sha256(cupy.asnumpy(b).tobytes()).hexdigest())
"""


def test_cupy(crowded: CrowdedGpu) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed in this Python")
    same(crowded, CUPY)


JAX = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
# In eighths: XLA takes as much again for a sum, and the room has less than that to spare.
ballast = [
    jax.random.bits(jax.random.key(3 + i), (BALLAST_BYTES // 32,), dtype=jnp.uint32)
    for i in range(8)
]
sum_of = jax.jit(lambda x: x.reshape(-1, 1 << 16).sum(1, dtype=jnp.uint32))
def sums():
    return np.stack([np.asarray(sum_of(part)) for part in ballast])
before = sums()
def loss(parameters, x):
    w, v = parameters
    return jnp.mean((jnp.tanh(x @ w) @ v - x.sum(1, keepdims=True)) ** 2)
@jax.jit
def step(parameters, key):
    x = jax.random.normal(key, (64, 128))
    value, grads = jax.value_and_grad(loss)(parameters, x)
    return [p - 0.01 * g for p, g in zip(parameters, grads)], value
keys = jax.random.split(jax.random.key(0), 3)
parameters = [jax.random.normal(keys[0], (128, 256)) / 16, jax.random.normal(keys[1], (256, 1))]
losses, key = [], keys[2]
for number in range(250):
    key, now = jax.random.split(key)
    parameters, value = step(parameters, now)
    losses.append(float(value).hex())
    pace()
right = bool((sums() == before).all())
found = hashlib.sha256()
for one in parameters:
    found.update(np.asarray(one).tobytes())
say(right=right, losses=losses, digest=found.hexdigest())
"""

JAX_ENV = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
    "JAX_PLATFORMS": "cuda",
}


def test_jax(crowded: CrowdedGpu) -> None:
    pytest.importorskip("jax", reason="JAX is not installed in this Python")
    same(crowded, JAX, **JAX_ENV)
