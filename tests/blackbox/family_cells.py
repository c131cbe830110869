"""Cells of a notebook that uses the GPU together with a child process."""

from __future__ import annotations

from gpu_cells import PRELUDE

CHILD = f"""{PRELUDE}
memory = Memory(int(sys.argv[1]), int(sys.argv[2]))
for line in sys.stdin:
    if line.strip() == "step":
        memory.step(write=True)
        print("stepped", flush=True)
    else:
        print("INTACT" if memory.intact() else "DAMAGED", flush=True)
"""
"""A program that does one thing for each line it reads, and ends with its standard input."""

FAMILY = f"""{PRELUDE}
import subprocess

class Child:
    def __init__(self, mib, seed):
        self.process = subprocess.Popen(
            [sys.executable, "-c", {CHILD!r}, str(mib), str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, word):
        print(word, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

child = None

def family_step():
    global child
    memory.step(write=True)
    if child is not None:
        try:
            lost = child.ask("step") != "stepped"
        except BrokenPipeError:
            lost = True
        if lost:
            assert child.process.wait() == -9, child.process.returncode
            child = None

def family_intact():
    said = "INTACT" if memory.intact() else "DAMAGED"
    return said if child is None else said + " " + child.ask("intact")

def family_loop(stop, beat):
    while not os.path.exists(stop):
        family_step()
        os.utime(beat)
        time.sleep(0.005)
    print("worked")
"""
"""The loop goes on without a child that was killed; any other end of the child is an error."""

INTACT = "print(family_intact())"
STEP = "family_step()\nprint('stepped')"


def child(mib: int, seed: int) -> str:
    """Return a cell that prints the child's pid once its memory is filled."""
    return f"child = Child({mib}, {seed})\nchild.ask('intact')\nprint(child.process.pid)"
