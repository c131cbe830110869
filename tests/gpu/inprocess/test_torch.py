"""Tests of PyTorch under the in-process pager: moved out at any point, its results are to the bit
those of a run without Kiwi.

Run with ``pytest -m gpu tests/gpu/inprocess``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from crowded_gpu import CrowdedGpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

TORCH = """
import hashlib, threading
import torch
from torch import nn
torch.use_deterministic_algorithms(True)
torch.manual_seed(7)

def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        found.update(data.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

class Ballast:
    '''Random bytes; a sum of each MiB is kept on the host.'''
    def __init__(self, bytes_=BALLAST_BYTES):
        self.data = torch.randint(-2**62, 2**62, (bytes_ // 8,), device="cuda")
        self.sums = self.now()
    def now(self):
        return self.data.view(-1, 1 << 17).sum(1).cpu()
    def right(self):
        return bool(torch.equal(self.now(), self.sums))
"""


@pytest.fixture(autouse=True)
def torch() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed in this Python")


def same(crowded: CrowdedGpu, source: str) -> None:
    """Check that the program prints the same alone and in a crowd, and that its ballast is
    right."""
    alone = crowded.alone(TORCH + source, **DETERMINISTIC)
    beside = crowded.crowded(TORCH + source, **DETERMINISTIC)
    assert alone["right"]
    assert beside == alone


CHECKSUMS = """
ballast = Ballast(BALLAST_BYTES // 2)
more = [torch.full((n * 1000 + 1,), n, dtype=torch.int32, device="cuda") for n in range(1, 400)]
right = True
for step in range(250):
    one = more[step % len(more)]
    right = right and int(one.sum()) == (one.numel() * (step % len(more) + 1))
    if step % 50 == 0:
        right = right and ballast.right()
    pace()
say(right=right and ballast.right(), digest=digest(*more))
"""


def test_checksums(crowded: CrowdedGpu) -> None:
    same(crowded, CHECKSUMS)


TRAINING = """
ballast = Ballast()
layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.Linear(64, 256), layer, nn.Linear(256, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(300):
    x = torch.randn(16, 32, 64, device="cuda")
    loss = (model(x).squeeze(-1) - x.mean(-1)).square().mean()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach().item().hex())
    pace()
say(right=ballast.right(), losses=losses, digest=digest(*model.parameters()))
"""


def test_a_training_has_the_same_losses(crowded: CrowdedGpu) -> None:
    same(crowded, TRAINING)


BACKWARD = """
ballast = Ballast()
class Slow(torch.autograd.Function):
    '''Its backward is met in the middle: it runs in autograd's own thread.'''
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        pace()
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0
grads = []
for step in range(4):
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    y = x
    for _ in range(60):
        y = Slow.apply(torch.tanh(y @ x.detach() / 30))
    y.square().mean().backward()
    grads.append(digest(x.grad))
say(right=ballast.right(), grads=grads)
"""


def test_a_backward_pass_in_flight(crowded: CrowdedGpu) -> None:
    same(crowded, BACKWARD)


GRAPHS = """
ballast = Ballast()
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
static = torch.zeros(64, 128, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    for _ in range(3):
        model(static)
torch.cuda.current_stream().wait_stream(side)
def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = model(static) + static
    return graph, result
graphs = [captured()]
results = []
for step in range(250):
    static.copy_(torch.randn(64, 128, device="cuda"))
    graph, result = graphs[step % len(graphs)]
    graph.replay()
    results.append(digest(result))
    if step % 60 == 59:  # one more, while somebody waits for this program's memory
        graphs.append(captured())
    pace()
say(right=ballast.right(), results=results)
"""


def test_graphs_are_replayed_after_a_page_in(crowded: CrowdedGpu) -> None:
    same(crowded, GRAPHS)


STREAMS = """
ballast = Ballast()
streams = [torch.cuda.Stream() for _ in range(4)]
values = [torch.zeros(1 << 20, device="cuda") for _ in streams]
torch.cuda.synchronize()
last = torch.cuda.Event()
last.record()
for step in range(250):
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            stream.wait_event(last)
            values[number].add_(values[number - 1], alpha=0.5).add_(step + number).remainder_(1000)
            last = torch.cuda.Event(enable_timing=True)
            last.record(stream)
    pace()
torch.cuda.synchronize()
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record(); end.record(); end.synchronize()
say(right=ballast.right() and begin.elapsed_time(end) >= 0, digest=digest(*values))
"""


def test_streams_and_events(crowded: CrowdedGpu) -> None:
    same(crowded, STREAMS)


EMPTY_CACHE = """
ballast = Ballast()
held, right = {}, True
generator = __import__("random").Random(3)
for step in range(250):
    for _ in range(4):
        size, value = generator.randrange(1, 1 << 22), generator.randrange(1 << 20)
        held[generator.randrange(40)] = (torch.full((size,), value, device="cuda"), value)
    if step % 5 == 0:
        torch.cuda.empty_cache()
    tensor, value = generator.choice(list(held.values()))
    right = right and bool((tensor == value).all())
    pace()
say(right=right and ballast.right(), digest=digest(*(held[n][0] for n in sorted(held))))
"""


def test_empty_cache(crowded: CrowdedGpu) -> None:
    same(crowded, EMPTY_CACHE)


LOADER = """
from torch.utils.data import DataLoader, TensorDataset
ballast = Ballast()
generator = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(4000, 256, generator=generator), torch.arange(4000))
loader = DataLoader(data, batch_size=32, num_workers=2, pin_memory=True, shuffle=True,
                    generator=torch.Generator().manual_seed(6))
sums, order = [], []
for _ in range(2):
    for x, n in loader:
        x, n = x.to("cuda", non_blocking=True), n.to("cuda", non_blocking=True)
        sums.append(x.double().sum().item().hex())
        order.append(int(n.sum()))
        pace()
say(right=ballast.right(), sums=sums, order=order)
"""


def test_a_data_loader_with_pinned_memory(crowded: CrowdedGpu) -> None:
    same(crowded, LOADER)


THREADS = """
ballast = Ballast()
found = {}
def work(number):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.full((1 << 18,), float(number), device="cuda")
        for step in range(150):
            value = (value * 1.5 + step).remainder(997)
            if step % 10 == 0:
                torch.empty(1 << 20, device="cuda").fill_(step)
            pace()
        stream.synchronize()
        found[number] = digest(value)
threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(right=ballast.right(), found=[found.get(n) for n in range(6)])
"""


def test_several_threads(crowded: CrowdedGpu) -> None:
    same(crowded, THREADS)


INTERRUPT = """
import signal
ballast = Ballast()
a = torch.randn(4096, 4096, device="cuda")
stop = threading.Event()
def interrupts():
    '''As Ctrl-C: again and again, while the main thread is in large operations or waits.'''
    while not stop.wait(0.7):
        os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=interrupts)
thread.start()
seen = 0
ends = time.monotonic() + 600
while seen < 8 and time.monotonic() < ends:
    try:
        while True:
            b = a
            for _ in range(40):
                b = (a @ b) / 64
            torch.cuda.synchronize()
            pace()
    except KeyboardInterrupt:
        seen += 1
stop.set()
while True:
    try:
        thread.join()
        break
    except KeyboardInterrupt:
        pass
torch.cuda.synchronize()
say(right=ballast.right(), seen=seen, digest=digest(a))
"""


def test_interrupts_in_large_operations(crowded: CrowdedGpu) -> None:
    same(crowded, INTERRUPT)


TRITON = """
import triton, triton.language as tl
@triton.jit
def axpy(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside)
    tl.store(out + at, value, mask=inside)
ballast = Ballast()
n = 1 << 22
x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
right = True
for step in range(250):
    out = torch.empty_like(x)
    axpy[(triton.cdiv(n, 1024),)](x, y, out, n, float(step), BLOCK=1024)
    right = right and bool(torch.allclose(out, x * step + y, rtol=1e-4, atol=1e-3))
    pace()
say(right=right and ballast.right(), digest=digest(out))
"""


def test_triton_kernels(crowded: CrowdedGpu) -> None:
    """The kernel is in its own file, because Triton reads a kernel's source."""
    pytest.importorskip("triton", reason="Triton is not installed in this Python")
    same(crowded, TRITON)
