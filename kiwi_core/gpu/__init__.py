"""The only part of Kiwi that talks to the CUDA driver and to NVML.

Narrow typed functions; result codes become ``GpuError`` with a sentence and a remedy; what they
return are frozen snapshots. Importing this package, or any module in it, needs no driver and loads
none: libraries are loaded by the first call that needs them.

``driver``     checkpoint calls on other processes (``cuda.core``, ``cuda.bindings``)
``nvml``       the GPUs, their memory, and who uses how much of it (``pynvml``)
``processes``  process identity and process trees, from ``/proc``
``memory``     this process's own context, memory and copies; ``vmm`` its virtual memory (bench)
``choice``     which GPU a word on the command line means
``host``       how much system RAM may still be used, cgroup limits included
"""
