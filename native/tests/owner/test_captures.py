"""Tests that the library's background work breaks no capture of the program."""

from __future__ import annotations

import pytest
from cuda_setups import GRAPHS


@pytest.mark.parametrize("blocking", [0, 1], ids=["blocking", "non-blocking"])
def test_pinning_beside_a_capture(program, blocking):
    """Work on the legacy default stream would break a capture in a blocking stream, in any mode."""
    p = program()
    p.do(
        GRAPHS + "from owner_calls import *\na = make(20 * MIB, 1)\n"
        f"x = ck(driver.cuStreamCreate({blocking})); begin(x); put(a.address, 7, MIB, x)\n"
        "prepare(); until(lambda: arena()['pinned'], 'nothing was pinned')"
    )
    assert p.get("status(x)") == 1
    p.do("run(instantiate(end(x)), x)")
    assert p.get("now(Allocation(a.address, MIB, '')) == hashlib.sha256(b'\\7' * MIB).hexdigest()")
