"""Decide whether a cell may use the GPU. Soundness matters more than cleverness."""

from kiwi_jupyter.kernel.analysis.analyzer import Analyzer, Verdict
from kiwi_jupyter.kernel.analysis.libraries import Libraries

__all__ = ["Analyzer", "Libraries", "Verdict"]
