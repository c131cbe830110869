"""Simulation: the real scheduler of one GPU runs a trace on a virtual clock.

==============  =================================================================================
``model``       the machine, its faults, the settings to compare
``trace``       the work: sessions, their cells, the file format (JSON lines)
``mixes``       generators of traces with stated parameters, repeatable by seed
``recorded``    turns a daemon's journal into a trace without ids and times of day
``engine``      the loop: feeds the scheduler events, performs its actions in virtual time
``driver``      how long operations take and how they end
``compute``     how fast runners compute: side by side they share the GPU
``measure``     waits, slowdown, useful share, fairness
``fleet``       many GPUs, pooled, on several cores
``picture``     waits by length of cell as an SVG
==============  =================================================================================

Nothing here reads a clock, and the seed determines every random number. ``kiwi simulate``, the
benchmarks and the tests of policies use this package.
"""
