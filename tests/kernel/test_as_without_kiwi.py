"""Tests that a notebook shows the same messages with Kiwi and without it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kernels import Cell, Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.client.scripted_daemon import ScriptedDaemon

CELLS = [
    "1 + 1",
    "tripgpu.use()",
    "x = tripgpu.use()\nx",
    "print('a')\ntripgpu.use()\nprint('b')\n[1,\n 2]",
    "tripgpu.use();",
    "tripgpu.use()\n1 / 0",
    "\n\nx = 1\ntripgpu.use(); 1 / 0\n",
    "def f(n):\n    return tripgpu.use(1 / n)\n\nf(0)",
    "for i in range(2):\n    tripgpu.use()\n    if i:\n        raise ValueError('x')",
    "this is a syntax error",
    "tripgpu.use()\nreturn 3",
    "tripgpu.use()\n  indented = 1",
    "%%time\ntripgpu.use()\n1/0",
    "%%capture out\ntripgpu.use()\nprint('hidden')",
    "out.stdout",
    "%timeit -n 1 -r 1 tripgpu.use()",
    "await tripgpu.later()",
    "await tripgpu.later()\n1 / 0",
    "async for i in tripgpu.many():\n    print(i)",
    "get_ipython().run_cell('tripgpu.use()\\n1/0').success",
    "%run broken.py",
    "tripgpu.use()\nimport sys\nsys.exit(3)",
    "raise KeyboardInterrupt",
    "tripgpu.Tensor()",
    "tripgpu.nothing",
    "from __future__ import annotations\ntripgpu.use()",
    "'''doc'''\ntripgpu.use()\n__doc__",
    "%%timeit -n 1 -r 1\ntripgpu.use()\n1 / 0",
    "!echo $((1 + 1)); exit 3",
    "_exit_code",
    "_, __, _i",
    "In[1], len(Out)",
    "display({'text/plain': 'shown'}, raw=True)",
    "class Bad:\n    def __repr__(self):\n        raise RuntimeError('no')\ntripgpu.use()\nBad()",
    "assert tripgpu.use() == 1, 'what'",
    "import warnings\ntripgpu.use()\nwarnings.warn('careful')",
]

MORE = """
async def later():
    import asyncio
    await asyncio.sleep(0)
    return use("later")
async def many():
    for i in range(2):
        yield use(i)
"""


@pytest.fixture
def both(daemon: ScriptedDaemon, make_kernel: Any, library: Any) -> Iterator[tuple[Kernel, Kernel]]:
    with (library / "tripgpu.py").open("a") as file:
        file.write(MORE)
    # No line about a wait: a busy machine may take a second for the answer of the daemon.
    quiet = "c.Kiwi.waiting_line_delay_s = 600.0"
    with make_kernel(config=quiet) as kiwi, make_kernel(KIWI_DISABLE="1") as plain:
        for kernel in (kiwi, plain):
            (kernel.directory / "broken.py").write_text("import tripgpu\ntripgpu.use()\n1/0\n")
            kernel.check("import tripgpu")
        yield kiwi, plain


def _comparable(cell: Cell, kernel: Kernel) -> list[Any]:
    """Return every message of a cell, without ids, times and paths."""
    found: list[Any] = []
    for message in [*cell.messages, cell.reply]:
        assert message is not None
        content = dict(message["content"])
        for noise in ("engine_info", "transient"):
            content.pop(noise, None)
        said = repr(content)
        said = re.sub(r"ipykernel_\d+/\d+", "CELL", said.replace(str(kernel.directory), "DIR"))
        said = re.sub(r"[\d.]+ (ns|us|µs|μs|ms|s)\b", "TIME", said)
        said = re.sub(r"0x[0-9a-f]+", "ADDRESS", said)
        found.append((message["msg_type"], said))
    return _joined(found)


def _joined(messages: list[Any]) -> list[Any]:
    """Join stream messages, because how prints are split depends on the time."""
    joined: list[Any] = []
    for kind, said in messages:
        if kind == "stream" and joined and joined[-1][0] == "stream":
            joined[-1] = (kind, joined[-1][1] + said)
        else:
            joined.append((kind, said))
    return [(k, re.sub(r"'\}\{'name': '\w+', 'text': '", "", s)) for k, s in joined]


def test_every_message_is_the_same(both: tuple[Kernel, Kernel], daemon: ScriptedDaemon) -> None:
    kiwi, plain = both
    for code in CELLS:
        with_kiwi, without = kiwi.run(code), plain.run(code)
        ours, theirs = _comparable(with_kiwi, kiwi), _comparable(without, plain)
        differences = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
        assert ours == theirs, f"{code}\n{differences}"
    assert len(daemon.peers) == 1
    assert len(daemon.peers[0].received) > 2 * 20  # only the kernel with Kiwi asked
