"""Foresee whether a cell goes for the GPU: a forecast with a time limit, nothing more.

Every program has a gate, which takes the lease at the first call that needs it. So nothing is to be
proved here: a cell runs at once unless it plainly goes for the GPU, and one that goes there
unforeseen waits at the gate. What is foreseen waits before its statement instead, where the wait is
easiest to see and to interrupt.

``libraries``  which libraries drive a GPU, and by which of their names (tables)
``values``     whether an object holds GPU memory, or leads to what drives a GPU
``forecast``   the statements of a cell, in their order, until the time is over
``plain``      what certainly stays on the CPU, for kernels without a gate
"""

from kiwi_jupyter.kernel.foresight.forecast import Forecaster, Foreseen
from kiwi_jupyter.kernel.foresight.libraries import Libraries

__all__ = ["Forecaster", "Foreseen", "Libraries"]
