"""Does a cell possibly use the GPU? Sound, not clever."""

from kiwi_jupyter.kernel.analysis.analyzer import Analyzer, Verdict
from kiwi_jupyter.kernel.analysis.libraries import Libraries

__all__ = ["Analyzer", "Libraries", "Verdict"]
