"""Makes the README's pictures from a real run: ``python docs/make_screenshots.py``.

Two notebooks that do not fit together share an emulated GPU in JupyterLab: one trains, the other
waits. Nothing is staged: the numbers are those of the run. Like the browser tests, whose helpers it
uses, it needs Chromium and the package with its labextension.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from browser import running_browser
from daemon import running_daemon
from lab import running_lab
from lab_page import LabPage
from playwright.sync_api import expect
from sharing_stage import Stage

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parent / "images"
GPU_SIZE, COPY_RATE, TQ_S = "1x1GiB", "600MiB", 10
"""A swap takes about a second, as with tens of gigabytes on a real GPU."""

WIDTH_PX, HEIGHT_PX = 1280, 800
SIDEBAR_PX, SIDEBAR_HEIGHT_PX = 330, 1280

WORK = '''
"""What the notebooks compute, over arrays in GPU memory, through plain cuda.bindings."""

import numpy as np
from cuda.bindings import driver as cuda


def check(result):
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if values else None


check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))


class OnGpu:
    """Rows of float32 in GPU memory."""

    def __init__(self, rows, columns, seed):
        self.rows, self.columns = rows, columns
        self.address = int(check(cuda.cuMemAlloc(rows * columns * 4)))
        random = np.random.default_rng(seed)
        for begin in range(0, rows, 10_000):
            block = random.standard_normal((min(10_000, rows - begin), columns), np.float32)
            check(cuda.cuMemcpyHtoD(self.address + begin * columns * 4, block, block.nbytes))

    def __getitem__(self, part):
        begin, end, _ = part.indices(self.rows)
        block = np.empty((end - begin, self.columns), np.float32)
        check(cuda.cuMemcpyDtoH(block, self.address + begin * self.columns * 4, block.nbytes))
        return block


class LogisticRegression:
    """By stochastic gradient descent; the labels are those of a plane that it does not know."""

    def __init__(self, columns):
        self.truth, self.weights = np.random.default_rng(0).standard_normal((2, columns), "f")

    def epoch(self, data, batch=256, rows=60_000):
        losses = []
        for begin in range(0, rows, batch):
            x = data[begin : begin + batch]
            y = x @ self.truth > 0
            p = 1 / (1 + np.exp(-x @ self.weights / 28))
            self.weights -= 0.1 * x.T @ (p - y) / len(x)
            losses.append(-np.log(np.where(y, p, 1 - p)).mean())
        return np.mean(losses)


def nearest(data, row, count=3, block=50_000):
    """The rows most like ``row``, itself left out."""
    query = data[row : row + 1][0]
    scores = np.concatenate([data[at : at + block] @ query for at in range(0, data.rows, block)])
    scores[row] = -np.inf
    return np.argsort(scores)[-count:][::-1]
'''

TRAINING = [
    "from work import LogisticRegression, OnGpu\n\nimages = OnGpu(200_000, 784, seed=1)",
    """model = LogisticRegression(784)
for epoch in range(10_000):
    loss = model.epoch(images)
    print(f"epoch {epoch:3d}   loss {loss:.4f}")""",
]
EXPLORATION = [
    "from work import OnGpu, nearest\n\nvectors = OnGpu(1_400_000, 128, seed=2)",
    "nearest(vectors, 41)",
    """for row in range(5):
    print(row, "is like", *nearest(vectors, row))""",
    "nearest(vectors, 42)",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    arguments = (GPU_SIZE, "--emulate-copy-rate", COPY_RATE, "--tq", str(TQ_S))
    with (
        running_browser() as browser,
        running_daemon(*arguments) as daemon,
        running_lab(daemon.env) as lab,
    ):
        (lab.notebooks / "work.py").write_text(WORK)
        lab.write_notebook("train_digits.ipynb", TRAINING)
        lab.write_notebook("explore_embeddings.ipynb", EXPLORATION)
        _photograph(browser, Stage(daemon, lab), out)
    return 0


def _photograph(browser: Browser, stage: Stage, out: Path) -> None:
    context = browser.new_context(
        viewport={"width": WIDTH_PX, "height": HEIGHT_PX}, locale="en-GB", timezone_id="UTC"
    )
    page = LabPage(context, stage.lab, "pictures")
    page.open()
    page.command("application:toggle-left-area")
    panel = page.panel()
    page.resize_sidebar(SIDEBAR_PX)
    panel.root.get_by_role("button", name="1 min").click()
    train = page.open_notebook("train_digits.ipynb")
    train.run(0)
    explore = page.open_notebook("explore_embeddings.ipynb", below=train.path)
    explore.run(0)
    train.start(1)
    stage.wait_state(train.path, "running")
    for cell in (1, 2):
        explore.run(cell)
        stage.wait_state(train.path, "running")
    explore.start(3)
    # The middle of a wait.
    expect(panel.part("countdown")).to_have_text(re.compile(f"about [4-{TQ_S - 3}] s"))
    for notebook, cell in ((train, 1), (explore, 3)):
        notebook.cell(cell).scroll_into_view_if_needed()
    page.page.screenshot(path=out / "jupyterlab.png", animations="disabled")
    page.page.set_viewport_size({"width": WIDTH_PX, "height": SIDEBAR_HEIGHT_PX})
    panel.root.screenshot(path=out / "sidebar.png", animations="disabled")
    context.close()


if __name__ == "__main__":
    raise SystemExit(main())
