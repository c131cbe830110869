"""Ways to use the GPU that the text of a cell does not show.

Each case has the code that ran before, and the cell. The cell calls ``touch`` or makes something
call it; ``touch`` uses the GPU and counts its calls.
"""

CUDA = """\
from cuda.bindings import driver as cuda
assert cuda.cuInit(0)[0] == 0
context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1]
cuda.cuCtxSetCurrent(context)
memory = cuda.cuMemAlloc(4096)[1]
"""

SETUP = (
    CUDA
    + """\
import asyncio, builtins, copy, functools, json, pickle, random, sqlite3, sys, threading, weakref
import contextlib, dataclasses, logging
import networkx as nx
import numpy as np
import pandas as pd
from concurrent.futures import ThreadPoolExecutor
from matplotlib.figure import Figure
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from tqdm import tqdm
touched = 0
def touch(*_, **__):
    global touched
    cuda.cuCtxSetCurrent(context)
    assert cuda.cuMemsetD8(memory, 7, 1)[0] == 0
    touched += 1
    return 1
class Tensor:
    def __add__(self, other): return touch()
    def __len__(self): return touch()
    def __eq__(self, other): return bool(touch())
    def __hash__(self): return touch()
    def __repr__(self): return str(touch())
    def __iter__(self): return iter([touch()])
    def __copy__(self): return touch()
    @property
    def x(self): return touch()
class Dies:
    def __del__(self): touch()
class Unpickled:
    def __reduce__(self): return touch, ()
class Object:
    pass
t = Tensor()
open("touches.py", "w").write("touch()")
"""
)

WAYS = [
    ("", "t + 1"),
    ("", "f'{t}'"),
    ("", "print([t])"),
    ("", "{'a': t}['a'].x"),
    ("", "getattr(t, 'x')"),
    ("", "getattr(sys.modules['__main__'], 'to' + 'uch')()"),
    ("", "globals()['touch']()"),
    ("", "exec('touch()')"),
    ("", "eval('touch()')"),
    ("", "list(map(touch, [1]))"),
    ("", "functools.reduce(touch, [1, 2])"),
    ("", "sorted([2, 1], key=touch)"),
    ("", "json.dumps({'a': Object()}, default=touch)"),
    ("", "copy.copy(t)"),
    ("", "a, = t"),
    ("", "match t:\n    case Tensor(x=1): pass"),
    ("", "class A:\n    value = touch()"),
    ("", "@touch\ndef f(): pass"),
    ("", "[1 for _ in range(2) if touch()]"),
    ("p = functools.partial(touch)", "p()"),
    ("c = functools.lru_cache(touch)", "c()"),
    ("def outer():\n    inner = touch\n    return lambda: inner()\nk = outer()", "k()"),
    ("g = (touch() for _ in range(2))", "next(g)"),
    ("async def co():\n    touch()", "await co()"),
    ("d = Dies()", "del d"),
    ("d = Dies()", "d = 1"),
    ("h = [Dies()]", "h.clear()"),
    ("w = Object()\nend = weakref.finalize(w, touch)", "w = None"),
    ("w = Object()\nr = weakref.ref(w, touch)", "w = None"),
    (
        "@dataclasses.dataclass\nclass D:\n    a: int = dataclasses.field(default_factory=touch)",
        "D()",
    ),
    ("@contextlib.contextmanager\ndef m():\n    touch()\n    yield", "with m(): pass"),
    ("", "s = threading.Thread(target=touch)\ns.start()\ns.join()"),
    ("", "with ThreadPoolExecutor(1) as pool:\n    pool.submit(touch).result()"),
    ("", "pd.Series([1, 2]).apply(touch)"),
    ("df = pd.DataFrame({'a': [t]})", "df['a'].map(len)"),
    ("o = np.array([t], dtype=object)", "o + 1"),
    ("", "np.vectorize(touch)([1])"),
    ("blob = pickle.dumps(Unpickled())", "pickle.loads(blob)"),
    (
        "u = np.empty(1, object); u[0] = Unpickled(); np.save('u.npy', u)",
        "np.load('u.npy', None, True)",
    ),
    ("ft = make_pipeline(FunctionTransformer(touch))", "ft.fit_transform([[1.0]])"),
    ("fig = Figure()\ncid = fig.canvas.mpl_connect('draw_event', touch)", "fig.savefig('f.png')"),
    ("fig = Figure()\nfig.held = Dies()", "import gc\nfig = None\ngc.collect()"),
    ("bar = tqdm(touch() for _ in range(2))", "for _ in bar: pass"),
    ("G = nx.Graph()\nG.add_node(1, w=t)", "[one['w'] + 1 for _, one in G.nodes(data=True)]"),
    (
        "base = sqlite3.connect(':memory:')\nbase.create_function('f', 0, touch)",
        "base.execute('select f()').fetchall()",
    ),
    ("", "%run -i touches.py"),
]
