"""Lists of the libraries that stay on the CPU, those that can reach a GPU, and the names in CPU
libraries that are exceptions.

A library that is in no list counts as one that can reach a GPU. The lists are data: the traits
``Kiwi.cpu_modules`` and ``Kiwi.gpu_modules`` extend them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Final

GPU_LIBRARIES: Final = frozenset(
    """
    accelerate aesara ai_edge_litert bitsandbytes caffe2 catboost chainer cucim cudf cudf_polars
    cugraph cuda cuml cunumeric cupy cupy_backends cupynumeric cupyx cuproj cuspatial cutlass cuvs
    cuxfilter cv2 dali dask_cuda deepspeed dgl diffusers fastai flash_attn flax gpytorch haiku jax
    jaxlib keras kvikio legate lightgbm lightning llama_cpp mxnet numba numba_cuda nvidia nvmath
    nvtx onnxruntime optax paddle peft polars pycuda pylibraft pynvml pyopencl pytorch_lightning
    raft_dask ray rmm sentence_transformers sglang tensorflow tensorrt tf_keras thinc tinygrad
    torch torch_geometric torchaudio torchtext torchvision transformer_engine transformers triton
    trl ucxx unsloth vllm warp xformers xgboost
    """.split()
)
"""Libraries that are known to drive a GPU, or that do so on request."""

SELDOM_GPU: Final = frozenset(
    "catboost cv2 lightgbm numba onnxruntime polars pynvml ray thinc xgboost".split()
)
"""Those of them that mostly work on the CPU: naming one is no plain use of the GPU."""

PLAINLY_GPU: Final = ("numba.cuda", "cv2.cuda")
"""Their parts whose use is plain."""

GPU_PARTS: Final = ("pyarrow.cuda", "pyarrow._cuda")
"""Parts of CPU libraries that reach a GPU."""

LOADED_AT_START: Final = frozenset({"cuda", "_cuda_bindings_redirector"})
"""What a .pth file of cuda-bindings 12 loads at the start of each Python: the namespace without any
of its parts, which reaches no GPU."""

ACCELERATORS: Final = frozenset({"cudf", "cuml", "legate", "cunumeric", "cupynumeric", "modin"})
"""Libraries that replace *other* libraries in place: once one is loaded, only the standard
library is still what its name says."""

CPU_LIBRARIES: Final = frozenset(
    """
    IPython PIL altair annotated_types anyio arrow attr attrs babel bokeh bs4 certifi chardet
    charset_normalizer colorama comm contourpy cycler dateutil decorator docutils et_xmlfile
    folium fontTools graphviz h5py httpx idna imageio ipywidgets jedi jinja2 joblib jsonschema
    kiwi_core kiwi_jupyter kiwisolver lxml markdown markupsafe matplotlib matplotlib_inline
    mpl_toolkits msgspec narwhals networkx numpy openpyxl packaging pandas parso patsy
    platformdirs plotly psutil pyarrow pydantic pydantic_core pygments pyparsing pytz regex
    requests rich seaborn scipy shapely simplejson six skimage sklearn sortedcontainers soupsieve
    sqlalchemy statsmodels tabulate tenacity termcolor threadpoolctl tokenizers tornado tqdm
    traitlets typing_extensions tzdata tzlocal urllib3 wcwidth wordcloud xarray xlrd yaml zmq
    """.split()
)
"""Third-party libraries that stay on the CPU whatever they are given, as long as that does."""

CPU_STDLIB: Final = frozenset(
    """
    __future__ _abc _ast _bisect _bz2 _codecs _collections _collections_abc _csv _datetime
    _decimal _functools _hashlib _heapq _io _json _locale _lzma _md5 _pydatetime _random
    _sha1 _sha2 _sha256 _sha512 _sre _statistics _string _struct _warnings _weakrefset _zoneinfo
    abc argparse array ast base64 binascii bisect bz2 calendar cmath collections
    colorsys configparser contextlib copy csv dataclasses datetime decimal difflib email enum
    errno filecmp fnmatch fractions functools genericpath getpass glob graphlib
    gzip hashlib heapq hmac html
    http io itertools json keyword locale logging lzma math mimetypes numbers pathlib platform
    posixpath pprint random re reprlib secrets shlex shutil stat statistics string struct
    tarfile tempfile
    textwrap this time token tokenize tomllib typing unicodedata urllib uuid warnings xml zipfile
    zlib zoneinfo
    """.split()
)
"""Standard library modules of which every public name stays on the CPU."""

PARTLY_CPU: Final[dict[str, frozenset[str]]] = {
    "os": frozenset(
        """
        path sep linesep environ getcwd chdir listdir scandir walk makedirs mkdir remove rename
        replace rmdir unlink stat getpid getppid getenv urandom cpu_count devnull curdir pardir
        extsep pathsep name fspath access R_OK W_OK X_OK F_OK get_terminal_size utime symlink
        link readlink chmod uname getuid getgid times getloadavg sched_getaffinity
        """.split()
    ),
    "sys": frozenset(
        """
        version version_info path argv platform maxsize getsizeof executable byteorder
        float_info int_info prefix base_prefix getrecursionlimit setrecursionlimit stdout stderr
        stdin flags implementation hexversion intern getdefaultencoding exit
        stdlib_module_names builtin_module_names getrefcount api_version copyright maxunicode
        """.split()
    ),
    "operator": frozenset(
        """
        add and_ concat contains countOf eq floordiv ge getitem gt index indexOf inv invert
        is_ is_not itemgetter le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift sub
        truediv truth xor iadd imul isub
        """.split()
    ),
    "asyncio": frozenset(
        """
        sleep gather wait wait_for create_task ensure_future Queue LifoQueue PriorityQueue Event
        Lock Semaphore BoundedSemaphore Condition TimeoutError CancelledError timeout TaskGroup
        as_completed shield to_thread
        """.split()
    ),
    "threading": frozenset(
        """
        Thread Lock RLock Event Timer Semaphore BoundedSemaphore Barrier Condition allocate_lock
        lock
        """.split()
    ),
    "concurrent": frozenset(),
    "concurrent.futures": frozenset(
        {"ThreadPoolExecutor", "as_completed", "wait", "TimeoutError", "ALL_COMPLETED"}
    ),
    "queue": frozenset({"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "Empty", "Full"}),
    "IPython": frozenset({"display", "version_info"}),
    "IPython.core.interactiveshell": frozenset({"open"}),  # IPython's replacement for open
    "IPython.core.display": frozenset(
        """
        HTML Markdown Math Latex SVG JSON GeoJSON Javascript Image Video Pretty Code ProgressBar
        DisplayObject TextDisplayObject set_matplotlib_formats
        """.split()
    ),
    "IPython.core.display_functions": frozenset(
        "display clear_output update_display publish_display_data DisplayHandle".split()
    ),
    "IPython.lib.display": frozenset("Audio FileLink FileLinks IFrame YouTubeVideo Code".split()),
    "pickle": frozenset({"dump", "dumps", "HIGHEST_PROTOCOL", "DEFAULT_PROTOCOL", "PickleError"}),
    "sqlite3": frozenset(
        """
        connect Connection Cursor Statement Blob Row Error DatabaseError IntegrityError
        OperationalError ProgrammingError
        PARSE_DECLTYPES PARSE_COLNAMES sqlite_version version
        """.split()
    ),
    "traceback": frozenset({"print_exc", "format_exc"}),
    "inspect": frozenset(
        """
        getdoc getsource getsourcelines getfile signature cleandoc isfunction isclass ismethod
        iscoroutinefunction Parameter Signature
        """.split()
    ),
}
"""Modules in which only these names stay on the CPU. The rest starts programs, or exposes frames,
other threads or the table of modules.
"""

SAME_AS: Final = {
    "posix": "os", "_operator": "operator", "_thread": "threading", "_asyncio": "asyncio",
    "_queue": "queue", "_pickle": "pickle", "_sqlite3": "sqlite3",
}  # fmt: skip
"""The module whose rules a C module follows."""

LOADED_WITHOUT_HARM: Final = frozenset(
    """
    _cffi_backend _plotly_utils bottleneck cffi cython_runtime debugpy defusedxml executing google
    ipykernel joblib jupyter_client jupyter_core numexpr pexpect pickleshare prompt_toolkit
    ptyprocess pure_eval pyarrow pydevconsole pydevd pydevd_file_utils pydevd_plugins
    pydevd_tracing pydev_ipython sitecustomize usercustomize stack_data asttokens backcall
    greenlet nest_asyncio appnope kiwi_jupyter mesonpy pytest _pytest pluggy hypothesis xdist
    """.split()
)
"""Modules that the kernel and CPU libraries load. Using them directly may still reach a GPU."""

LOADED_PREFIXES: Final = (
    "_cython_", "_pydev", "__mp_main__", "__main__", "_sysconfigdata", "_distutils_hack",
    "__editable__",
)  # fmt: skip

DENIED_IN: Final[dict[str, frozenset[str]]] = {
    "numpy": frozenset("ctypeslib f2py distutils load testing frompyfunc".split()),
    "numpy.lib": frozenset({"format", "npyio"}),
    "pandas": frozenset("read_pickle read_hdf eval core compat io api".split()),
    "sklearn": frozenset({"externals"}),
    "matplotlib": frozenset({"use"}),
    "scipy": frozenset({"LowLevelCallable"}),
    "joblib": frozenset("load Memory externals memory numpy_pickle parallel_config".split()),
    "pyarrow": frozenset("cuda deserialize read_serialized foreign_buffer".split()),
    "networkx": frozenset({"config", "read_gpickle"}),
    "sqlalchemy": frozenset({"event", "PickleType"}),
    "logging": frozenset({"config", "handlers"}),
    "tqdm": frozenset({"contrib"}),
    "plotly": frozenset({"io"}),
    "collections": frozenset(),
    "typing": frozenset({"get_type_hints"}),
    "ast": frozenset(),
}
"""Names in CPU libraries that run what they read, or return something that can."""

DENIED_ATTRIBUTES: Final = frozenset(
    """
    f_globals f_locals f_back f_builtins gi_frame gi_code cr_frame ag_frame tb_frame tb_next
    func_globals _getframe _current_frames modules load_extension load_library read_pickle
    system popen spawnl spawnv spawnle spawnve spawnlp spawnvp execl execv execle execve execvp
    fork forkpty posix_spawn loads_pickle attrgetter methodcaller get_objects get_referrers
    get_referents settrace setprofile exc_info last_value last_traceback eval query format_map
    vformat get_field Popen check_output check_call getoutput run_cell ev ex user_ns user_global_ns
    user_module run_line_magic run_cell_magic import_module find_spec exec_module load_module
    allow_pickle ctypeslib
    """.split()
)
"""Attributes that lead from harmless objects to arbitrary ones."""

HARMLESS_DUNDERS: Final = frozenset(
    """
    __name__ __qualname__ __doc__ __version__ __file__ __init__ __class__ __len__ __repr__
    __str__ __enter__ __exit__ __iter__ __next__ __getitem__ __setitem__ __contains__ __call__
    __eq__ __hash__ __post_init__ __add__ __mul__ __sub__ __lt__ __gt__ __abs__ __bool__
    __annotations__ __module__ __new__ __array__ __cause__ __all__
    """.split()
)

SAFE_BUILTINS: Final = frozenset(
    """
    abs aiter all anext any ascii bin bool bytearray bytes callable chr classmethod complex
    dict dir divmod enumerate filter float format frozenset hasattr hash hex id input int
    isinstance issubclass iter len list map max memoryview min next object oct open ord pow print
    property range repr reversed round set slice sorted staticmethod str sum super tuple type zip
    Ellipsis NotImplemented __debug__ __build_class__ __name__ __doc__ __file__ exit quit copyright
    credits license display True False None
    """.split()
)
"""Builtins that do only what their arguments do. All exceptions belong here too."""


class Libraries:
    """The lists, with a user's additions, and the places that libraries may come from."""

    def __init__(
        self, cpu: frozenset[str] = frozenset(), gpu: frozenset[str] = frozenset()
    ) -> None:
        self.gpu = (GPU_LIBRARIES | gpu) - cpu
        self.cpu = (CPU_LIBRARIES | cpu) - self.gpu
        self._seldom = SELDOM_GPU - gpu
        self._trusted_modules: dict[str, tuple[int, bool]] = {}

    def is_gpu(self, module: str) -> bool:
        """Return whether ``module`` belongs to a library that is known to reach a GPU."""
        return module.partition(".")[0] in self.gpu or module.startswith(GPU_PARTS)

    def is_plainly_gpu(self, module: str) -> bool:
        """Return whether ``module`` belongs to a library whose purpose is to drive a GPU."""
        top = module.partition(".")[0]
        return top in self.gpu and (top not in self._seldom or module.startswith(PLAINLY_GPU))

    def is_gpu_when_loaded(self, module: str) -> bool:
        """Return whether a loaded ``module`` shows that somebody imported a library for GPUs."""
        return module not in LOADED_AT_START and self.is_plainly_gpu(module)

    def is_known(self, module: str) -> bool:
        """Return whether ``module`` is of the standard library or of one in the lists."""
        top = module.partition(".")[0]
        return top in sys.stdlib_module_names or top in self.cpu or top in self.gpu

    def is_users(self, module: str) -> bool:
        """Return whether ``module`` is the notebook or a file of its user's, and not part of a
        package.
        """
        if module == "__main__":
            return True
        loaded = sys.modules.get(module.partition(".")[0])
        return loaded is not None and not self._is_installed(module.partition(".")[0], loaded)

    def is_cpu(self, module: str) -> bool:
        """Return whether ``module`` belongs, by name, to the libraries that stay on the CPU (all or
        part of it).
        """
        top = SAME_AS.get(module, module).partition(".")[0]
        return top in CPU_STDLIB or top in PARTLY_CPU or top in self._third_party()

    def _third_party(self) -> frozenset[str]:
        return frozenset() if ACCELERATORS & sys.modules.keys() else self.cpu

    def is_trusted(self, module: str) -> bool:
        """Return whether ``module`` stays on the CPU and really is the library of that name.

        A file ``random.py`` beside the notebook is not the standard library's.
        """
        if not self.is_cpu(module):
            return False
        top = module.partition(".")[0]
        if module.startswith(GPU_PARTS) or (top == "networkx" and _installed("nx_cugraph")):
            return False
        loaded = sys.modules.get(top)
        if loaded is None:
            return not _shadowed(top)
        return self._is_installed(top, loaded)

    def _is_installed(self, top: str, loaded: object) -> bool:
        known = self._trusted_modules.get(top)
        if known is None or known[0] != id(loaded):
            known = (id(loaded), _comes_from_environment(loaded))
            self._trusted_modules[top] = known
        return known[1]

    def is_other_stdlib(self, module: str) -> bool:
        """Return whether ``module`` is of the standard library, but not in the CPU lists:
        ``subprocess``, ``importlib``, ``gc`` …
        """
        if module in ("builtins", "__main__", "types"):
            return False
        return module.partition(".")[0] in sys.stdlib_module_names and not self.is_cpu(module)

    def loaded_without_harm(self, module: str) -> bool:
        """Return whether ``module`` may be in the process without any of its code reaching a GPU by
        itself. More modules are harmless when loaded than when used.
        """
        if module in LOADED_AT_START:
            return True
        top = module.partition(".")[0]
        if top in self.gpu:
            return False
        if top == module and top not in sys.stdlib_module_names:
            # Cython registers modules under short names; their spec has the whole one.
            spec = getattr(sys.modules.get(module), "__spec__", None)
            top = getattr(spec, "name", module).partition(".")[0]
        return (
            top in sys.stdlib_module_names
            or top in self._third_party()
            or top in LOADED_WITHOUT_HARM
            or top.startswith(LOADED_PREFIXES)
        )

    def allows_origin(self, module: str, name: str) -> bool:
        """Return whether an object that says it is ``module.name`` stays on the CPU. It may have
        been imported by another path, so a name of any part of ``module`` counts.
        """
        module = SAME_AS.get(module, module)
        top = module.partition(".")[0]
        if top in PARTLY_CPU:
            return any(
                name in names
                for key, names in PARTLY_CPU.items()
                if key == top or key.startswith(top + ".")
            )
        return name not in DENIED_IN.get(top, ()) and name not in DENIED_IN.get(module, ())

    def allows(self, module: str, name: str) -> bool:
        """Return whether ``module.name`` of a trusted ``module`` stays on the CPU."""
        module = SAME_AS.get(module, module)
        if module in PARTLY_CPU:
            return name in PARTLY_CPU[module] or f"{module}.{name}" in PARTLY_CPU
        if name in DENIED_IN.get(module, ()) or name in DENIED_ATTRIBUTES:
            return False
        return not is_dunder(name) or name in HARMLESS_DUNDERS


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def attribute_is_harmless(name: str) -> bool:
    """Return whether attribute ``name`` of a value that stays on the CPU stays there, too."""
    if name in DENIED_ATTRIBUTES:
        return False
    return not is_dunder(name) or name in HARMLESS_DUNDERS


def _environment_roots() -> tuple[str, ...]:
    import sysconfig

    paths = {os.path.realpath(p) for p in sysconfig.get_paths().values()}
    return (*(p + os.sep for p in paths), os.path.dirname(os.path.realpath(os.__file__)) + os.sep)


_ROOTS: tuple[str, ...] = ()


def _comes_from_environment(module: object) -> bool:
    """Return whether a loaded module is frozen, built in, or a file of this Python's
    environment.
    """
    global _ROOTS
    if type(module) is not type(sys):
        return False
    _ROOTS = _ROOTS or _environment_roots()
    spec = module.__dict__.get("__spec__")
    if spec is None:
        return module.__dict__.get("__name__") == "__main__"
    origin = getattr(spec, "origin", None)
    if origin is None:  # a namespace package
        places = list(getattr(spec, "submodule_search_locations", None) or [])
        return bool(places) and all(os.path.realpath(p).startswith(_ROOTS) for p in places)
    if origin in ("built-in", "frozen"):
        return True
    return os.path.realpath(origin).startswith(_ROOTS) or _is_editable_kiwi(module)


def _is_editable_kiwi(module: object) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] in ("kiwi_core", "kiwi_jupyter")


def _installed(top: str) -> bool:
    """Return whether a library is installed that takes over other libraries' work when it is
    called.
    """
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return True


def _shadowed(top: str) -> bool:
    """Return whether a file outside the environment would be imported under the name ``top``."""
    global _ROOTS
    _ROOTS = _ROOTS or _environment_roots()
    for entry in sys.path:
        place = os.path.realpath(entry or os.getcwd())
        if (place + os.sep).startswith(_ROOTS) or not os.path.isdir(place):
            continue
        base = os.path.join(place, top)
        if os.path.exists(base + ".py") or os.path.isdir(base):
            return True
    return False
