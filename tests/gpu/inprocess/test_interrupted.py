"""Tests of frameworks whose calls are interrupted while they wait at the gate: each raises a plain
exception and lives on, and what it computes after that is right.

Run with ``pytest -m gpu tests/gpu/inprocess``. They have not yet run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from crowded_gpu import CrowdedGpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

INTERRUPTED = """
import ctypes, hashlib, os, signal, threading, time

library = ctypes.CDLL(None)
under_kiwi = hasattr(library, "kiwi_preload_interruptible")
if under_kiwi:  # as Kiwi's extension does in a kernel
    later = ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p)
    library.kiwi_preload_interruptible(later)

interrupts = {"KeyboardInterrupt": 0, "error": 0}
over = threading.Event()

def disturb():
    while not over.wait(0.31):
        os.kill(os.getpid(), signal.SIGINT)

def persistently(compute):
    '''Interrupts come only within ``compute``, which may be repeated.'''
    while True:
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                result = compute()
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            return result
        except KeyboardInterrupt:
            interrupts["KeyboardInterrupt"] += 1
        except Exception as error:
            if "unavailable" not in str(error).lower():
                raise
            interrupts["error"] += 1

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
if under_kiwi:
    threading.Thread(target=disturb, daemon=True).start()
found, right = hashlib.sha256(), True
"""

END = """
over.set()
assert not under_kiwi or interrupts["KeyboardInterrupt"], interrupts
say(right=right, digest=found.hexdigest())
"""

TORCH = """
import torch
torch.manual_seed(7)
x = torch.randn(512, 512, device="cuda", dtype=torch.float64)
def step(number):
    w = torch.full((512, 512), 1.0 + number / 1000, device="cuda", dtype=torch.float64)
    w.requires_grad_(True)
    ((x @ w).tanh() ** 2).sum().backward()
    return w.grad.sum(0).cpu().numpy().tobytes()
for number in range(120):
    found.update(persistently(lambda: step(number)))
    pace()
"""

CUPY = """
import cupy
cupy.random.seed(7)
x = cupy.random.standard_normal((512, 512))
def step(number):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cupy.tanh(x * (1.0 + number / 1000)) + cupy.arange(512)
        y = y.sum(0)
    stream.synchronize()
    return cupy.asnumpy(y).tobytes()
for number in range(120):
    found.update(persistently(lambda: step(number)))
    pace()
"""

JAX = """
import jax, jax.numpy as jnp, numpy as np
x = jax.random.normal(jax.random.key(7), (512, 512))
compute = jax.jit(lambda x, f: jnp.tanh(x * f).sum(0))
compute(x, 1.0).block_until_ready()
def step(number):
    return np.asarray(compute(x, 1.0 + number / 1000)).tobytes()
for number in range(120):
    found.update(persistently(lambda: step(number)))
    pace()
"""

PROGRAMS = {"torch": TORCH, "cupy": CUPY, "jax": JAX}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_framework_lives_on(crowded: CrowdedGpu, framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed in this Python")
    source = INTERRUPTED + PROGRAMS[framework] + END
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    alone, beside = crowded.alone(source, **env), crowded.crowded(source, **env)
    assert beside == alone
