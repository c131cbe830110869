"""Other things that notebooks do on the CPU, each with the cells that it needs before it.

None of them uses the GPU. Each runs in a notebook that has used it; see ``test_sets.py``.
"""

SETUP = """\
import gc, io, json, os, pickle, random, shutil, sys, tempfile, time
import numpy as np
import pandas as pd
import matplotlib.pyplot as plt
from pathlib import Path
numbers = list(range(10))
table = pd.DataFrame({"a": range(5), "b": list("vwxyz")})
array = np.arange(12.0).reshape(3, 4)
Path("text.txt").write_text("one\\ntwo\\n")
Path("script.py").write_text("import math\\nprint(math.pi)\\n")
np.save("array.npy", array)
table.to_pickle("table.pkl")
"""

IDIOMS = [
    # files
    "f = open('text.txt')\nlines = f.readlines()\nf.close()",
    "with open('copy.txt', 'w') as out, open('text.txt') as source:\n    out.write(source.read())",
    "f = open('text.txt', 'rb')\nfirst = f.read(3)",
    "f.close()\nf = None",
    "with open('data.json', 'w') as file:\n    json.dump({'a': numbers}, file)",
    "data = json.load(open('data.json'))\ndata['a'][-1]",
    "with open('data.pkl', 'wb') as file:\n    pickle.dump(data, file)",
    "blob = pickle.dumps(data)\nlen(blob)",
    "loaded = np.load('array.npy')\nloaded.sum()",
    "np.savez('many.npz', a=array, b=array * 2)",
    "archive = np.load('many.npz')\nsorted(archive.files)",
    "buffer = io.StringIO()\ntable.to_csv(buffer)\nbuffer.getvalue()[:10]",
    "with tempfile.TemporaryDirectory() as place:\n    shutil.copy('text.txt', place)",
    "for path in sorted(Path('.').glob('*.txt')):\n    print(path.name, path.stat().st_size)",
    (
        "import csv\nwith open('rows.csv', 'w', newline='') as file:\n"
        "    csv.writer(file).writerows([[1, 2], [3, 4]])"
    ),
    "import gzip\nwith gzip.open('text.gz', 'wt') as file:\n    file.write('packed')",
    "import zipfile\nwith zipfile.ZipFile('a.zip', 'w') as pack:\n    pack.write('text.txt')",
    # the interpreter
    "gc.collect()",
    "import time\nbefore = time.perf_counter()\nsum(numbers)\nprint(time.perf_counter() > before)",
    "answer = input('your name? ')",
    "del numbers[0]\nnumbers",
    "import warnings\nwarnings.filterwarnings('ignore')",
    "random.seed(0)\nnp.random.seed(0)",
    "sys.getsizeof(array), sys.version",
    "os.environ['MODE'] = 'test'\nos.environ.get('MODE')",
    "import threading\nlock = threading.Lock()\nwith lock:\n    counter = 1",
    (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool:\n    print(list(pool.map(abs, [-1, 2])))"
    ),
    "import asyncio\nasync def later():\n    await asyncio.sleep(0)\n    return 5\nawait later()",
    "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()",
    "import inspect\ndef documented():\n    'It has one.'\ninspect.getdoc(documented)",
    "import subprocess\nsubprocess.run(['ls'], capture_output=True).returncode",
    # IPython
    "%who",
    "%whos",
    "%store numbers",
    "!python script.py",
    "!python -c 'print(1 + 1)'",
    "%run script.py",
    "%timeit -n 2 -r 1 sum(numbers)",
    "from IPython.display import HTML, Markdown, display\ndisplay(HTML('<b>x</b>'))",
    "from IPython.display import clear_output\nclear_output(wait=True)\nprint('done')",
    "display(table)",
    "%matplotlib inline",
    # libraries
    (
        "import sqlite3\nbase = sqlite3.connect(':memory:')\n"
        "base.execute('create table t (a int)')\nbase.execute('insert into t values (1)')"
    ),
    "pd.read_sql('select * from t', base)",
    "base.close()",
    "import logging\nlog = logging.getLogger(__name__)\nlog.setLevel(logging.INFO)\nlog.info('x')",
    "handler = logging.StreamHandler()\nlog.addHandler(handler)\nlog.removeHandler(handler)",
    (
        "import pyarrow as pa\nimport pyarrow.parquet as pq\n"
        "pq.write_table(pa.table({'a': [1, 2]}), 'a.parquet')"
    ),
    "pq.read_table('a.parquet').to_pandas()",
    "import networkx as nx\ngraph = nx.path_graph(4)\nnx.shortest_path(graph, 0, 3)",
    "graph.add_edge(0, 3)\nsorted(graph.degree)",
    (
        "from sqlalchemy import create_engine, text\nengine = create_engine('sqlite://')\n"
        "with engine.connect() as connection:\n    connection.execute(text('select 1')).scalar()"
    ),
    "import joblib\njoblib.dump({'a': 1}, 'a.joblib')",
    "from joblib import Parallel, delayed\nParallel(n_jobs=1)(delayed(abs)(n) for n in [-1, 2])",
    "from sklearn.linear_model import Ridge\nfitted = Ridge().fit(array, [1, 2, 3])\nfitted.coef_",
    "fitted = Ridge(alpha=2.0).fit(array, [1, 2, 3])\nfitted.predict(array)",
    "fig, ax = plt.subplots()\nax.plot(numbers)\nplt.show()",
    "fig, ax = plt.subplots()\nax.bar(table['b'], table['a'])\nplt.show()",
    "from tqdm.auto import tqdm\nfor _ in (bar := tqdm(range(3))):\n    bar.set_postfix(a=1)",
    (
        "import re, itertools, functools\npattern = re.compile('a+')\n"
        "compose = functools.reduce(lambda f, g: lambda x: g(f(x)), [abs, str])\n"
        "compose(-3), pattern.sub('b', 'caat')"
    ),
]
