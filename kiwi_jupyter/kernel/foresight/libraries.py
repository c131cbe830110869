"""Which libraries drive a GPU, and by which of their names. Each table has its reason, or an
example from a public notebook that it decides.

An import uses no GPU, whatever the library: ``import cupy`` and ``import jax`` do not start the
driver. The traits ``Kiwi.cpu_modules`` and ``Kiwi.gpu_modules`` take libraries out and put them in.
"""

from __future__ import annotations

import re
import sys
from typing import Final

DRIVE: Final[dict[str, frozenset[str]]] = {
    "cudf": frozenset("option_context set_option get_option describe_option errors utils".split()),
    "cugraph": frozenset(),
    "cuml": frozenset({"set_global_output_type", "using_output_type"}),
    "cupy": frozenset(
        """
        dtype float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_
        complex64 complex128 newaxis pi e inf nan ndarray testing show_config fuse RawKernel
        ElementwiseKernel ReductionKernel RawModule get_default_memory_pool
        """.split()
    ),
    "cuspatial": frozenset(),
    "cuvs": frozenset(),
    "cuxfilter": frozenset(),
    "cucim": frozenset(),
    "dask_cuda": frozenset(),
    "jax": frozenset(
        """
        jit grad value_and_grad vmap pmap jacfwd jacrev hessian checkpoint remat custom_jvp
        custom_vjp named_call config tree tree_util typing debug make_jaxpr eval_shape
        ShapeDtypeStruct Array dtypes named_scope experimental ensure_compile_time_eval
        default_matmul_precision util core extend lax.scan
        """.split()
    ),
    "jaxlib": frozenset(),
    "legate": frozenset(),
    "cupynumeric": frozenset("float32 float64 int32 int64 ndarray pi inf nan".split()),
    "nvmath": frozenset(),
    "pycuda": frozenset({"compiler"}),
    "pylibraft": frozenset(),
    "rmm": frozenset({"statistics"}),
    "tensorflow": frozenset(
        """
        config keras data.AUTOTUNE float16 float32 float64 int32 int64 uint8 bool string dtypes
        function Module TensorSpec TensorShape executing_eagerly compat version io gfile
        train.Feature train.Features train.Example autograph get_logger summary test
        """.split()
    ),
    "tinygrad": frozenset({"dtypes"}),
    "vllm": frozenset({"SamplingParams"}),
    "warp": frozenset("kernel func config struct float32 int32 vec2 vec3 vec4 mat33".split()),
}
"""Libraries whose functions use the GPU by themselves, with those of their names that do not:
settings, types, and what only wraps a function for later (``@jax.jit``)."""

MOVES: Final[dict[str, frozenset[str]]] = {
    "accelerate": frozenset({"Accelerator", "notebook_launcher", "dispatch_model"}),
    "bitsandbytes": frozenset({"optim"}),
    "diffusers": frozenset(),
    "fastai": frozenset(
        """
        Learner vision_learner cnn_learner unet_learner tabular_learner text_classifier_learner
        language_model_learner collab_learner default_device
        """.split()
    ),
    "keras": frozenset("Model Sequential models.load_model".split()),
    "lightning": frozenset({"Trainer"}),
    "llama_cpp": frozenset({"Llama"}),
    "peft": frozenset(),
    "pytorch_lightning": frozenset({"Trainer"}),
    "sentence_transformers": frozenset({"SentenceTransformer", "CrossEncoder"}),
    "sglang": frozenset({"Engine"}),
    "tf_keras": frozenset("Model Sequential models.load_model".split()),
    "transformers": frozenset({"Trainer", "Seq2SeqTrainer", "pipeline", "Pipeline"}),
    "trl": frozenset("SFTTrainer DPOTrainer PPOTrainer RewardTrainer GRPOTrainer".split()),
    "ultralytics": frozenset({"YOLO"}),
    "unsloth": frozenset({"FastLanguageModel", "FastModel", "FastVisionModel"}),
    "whisper": frozenset({"load_model"}),
}
"""Names in libraries on top of PyTorch or TensorFlow that move their work to the GPU by themselves,
where there is one: ``Trainer(…).train()``, ``pipeline("summarization")``."""

ON_REQUEST: Final = frozenset({"torch", "torchvision", "torchaudio", "torch_geometric", *MOVES})
"""Libraries that use the GPU where the code says so: ``x.to(device)``, ``device="cuda"``,
``model.cuda()``. Nothing else of ``import torch`` and ``torch.nn.Linear(2, 2)`` uses it."""

PARTS: Final[dict[str, frozenset[str]]] = {
    "cuda": frozenset(),
    "cv2.cuda": frozenset({"getCudaEnabledDeviceCount"}),
    "numba.cuda": frozenset(
        """
        jit is_available detect grid gridsize threadIdx blockIdx blockDim gridDim shared local
        syncthreads atomic float32 types
        """.split()
    ),
    "nvidia": frozenset(),
    "torch.cuda": frozenset(
        """
        is_available device_count get_device_name get_device_properties get_device_capability
        current_device is_initialized is_bf16_supported memory_allocated memory_reserved
        max_memory_allocated max_memory_reserved manual_seed manual_seed_all amp version
        get_arch_list reset_peak_memory_stats OutOfMemoryError
        """.split()
    ),
    "torch.backends": frozenset({"cudnn", "cuda", "mps"}),
}
"""Parts of libraries whose functions use the GPU, with those that only look at it or only set
something (``torch.cuda.is_available()``)."""

DEVICE_WORDS: Final = frozenset({"device", "device_map"})
"""Keywords whose argument says where something goes: ``torch.randn(2, device="cuda")``."""

TO_GPU: Final = frozenset({"to", "cuda", "to_empty"})
"""Methods that take an object to the GPU."""

QUIET_ATTRIBUTES: Final = frozenset(
    """
    shape size dtype device ndim is_cuda requires_grad name names __len__ __class__ __name__ dim
    itemsize nbytes columns index sharding weak_type parameters named_parameters children modules
    named_modules config generation_config numel element_size grad_fn is_leaf training eval train
    register_forward_hook register_hook requires_grad_ state
    """.split()
)
"""Attributes that tell about an object without using the GPU that it is on."""

GPU_TEXT: Final = re.compile(r"(cuda|gpu|auto|balanced|sequential)\b|\d+\Z")
"""What names a GPU where something says where to go; any other text is a unit, a format, a CPU."""

CPU_LIBRARIES: Final = frozenset(
    """
    IPython PIL altair bokeh bs4 folium ipywidgets joblib kiwi_core kiwi_jupyter matplotlib
    mpl_toolkits networkx numpy openpyxl pandas plotly pyarrow requests scipy seaborn skimage
    sklearn statsmodels sympy tabulate tqdm wordcloud xarray yaml
    """.split()
)
"""Third-party libraries that stay on the CPU whatever they are given."""


class Libraries:
    """The tables, with a user's additions."""

    def __init__(
        self, cpu: frozenset[str] = frozenset(), gpu: frozenset[str] = frozenset()
    ) -> None:
        self._drive = {**DRIVE, **dict.fromkeys(gpu, frozenset())}
        self._parts = {name: quiet for name, quiet in PARTS.items() if name not in cpu}
        self._moves = {name: names for name, names in MOVES.items() if name not in cpu}
        for name in cpu:
            self._drive.pop(name, None)
        self.on_request = ON_REQUEST - cpu
        self.named_cpu = cpu
        tops = {name.partition(".")[0] for name in (*self._drive, *self._parts)}
        self.known = (tops | self.on_request) - cpu
        """Top-level names of everything in the tables."""

    def is_driven_by(self, module: str) -> bool:
        """Return whether objects of a class in ``module`` are in a GPU, or work there."""
        driven = module.partition(".")[0] in self._drive
        return driven or any(_within(module, part) for part in self._parts)

    def call_uses_gpu(self, path: str) -> bool:
        """Return whether a call of ``path``, a library's function by its full name, uses the
        GPU."""
        top, _, inside = path.partition(".")
        for part, quiet in self._parts.items():
            if _within(path, part):
                return not _named(path[len(part) + 1 :], quiet)
        if top in self._drive:
            return bool(inside) and not _named(inside, self._drive[top])
        return _named_at_the_end(inside, self._moves.get(top, frozenset()))

    def moves_by_itself(self, module: str, name: str) -> bool:
        """Return whether the class ``name`` of ``module`` moves its work to the GPU by itself."""
        return name in self._moves.get(module.partition(".")[0], frozenset())

    # Of the two, Python walks through the smaller set: these names, not thousands of modules.

    def any_loaded(self) -> bool:
        return not sys.modules.keys().isdisjoint(self.known)

    def torch_like_loaded(self) -> bool:
        return not sys.modules.keys().isdisjoint(self.on_request)


def _within(path: str, part: str) -> bool:
    return path == part or path.startswith(part + ".")


def _named(inside: str, names: frozenset[str]) -> bool:
    """Return whether ``inside`` is one of ``names``, or lies in one."""
    words = inside.split(".")
    return any(".".join(words[: i + 1]) in names for i in range(len(words))) or (
        words[-1].startswith("__")
    )


def _named_at_the_end(inside: str, names: frozenset[str]) -> bool:
    """Return whether one of the words of ``inside`` is in ``names``: libraries offer the same name
    at several places."""
    return not names.isdisjoint(inside.split(".")) or inside in names
