"""What would happen: the real scheduler of one GPU on a virtual clock, over a trace.

==============  =================================================================================
``model``       the machine, its faults, the settings that are compared
``trace``       the work: sessions, their cells, the file format (JSON lines)
``mixes``       generators of traces with stated parameters; a seed makes them repeat
``recorded``    a daemon's journal as a trace, without ids and times of day
``engine``      the loop: events into the scheduler, actions performed in virtual time
``driver``      how long operations take and how they come out
``compute``     who computes how fast: runners side by side share the GPU
``measure``     waits, slowdown, useful share, fairness
``fleet``       many GPUs, pooled, on several cores
``picture``     waits by length of cell as an SVG
==============  =================================================================================

Nothing here reads a clock or draws a number that the seed does not decide. Used by
``kiwi simulate``, by the benchmarks and by the tests of policies.
"""
