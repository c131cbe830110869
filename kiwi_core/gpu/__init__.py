"""The only part of Kiwi that talks to the CUDA driver and to NVML.

Narrow typed functions turn result codes into ``GpuError`` with a sentence and a remedy, and return
frozen snapshots. Importing this package, or any module in it, needs no driver and loads none: the
first call that needs a library loads it.

``driver``     checkpoint calls on other processes (``cuda.bindings``)
``nvml``       the GPUs, their memory, and how much of it each process uses (``pynvml``)
``processes``  process identity and process trees, from ``/proc``
``memory``     this process's own context, memory and copies; ``vmm`` its virtual memory (bench)
``choice``     finds the GPU that a word on the command line names
``host``       how much system RAM may still be used, cgroup limits included
"""
