"""``kiwi bench``: what this machine can do, and how far Kiwi is from it.

The process that the user started only conducts: it loads no driver. Whatever uses the GPU is a
process of its own (``worker``), steered by one JSON line per order, with a time limit for each;
it gives everything back and ends when its input ends, so that nothing outlives a killed bench.

``plan``      how much of everything is used, and how large the pieces are (pure)
``limits``    the machine: copies, pinning, driver calls
``distance``  Kiwi: the lease, and for each of ``backends`` ``paging`` and ``switching``
``movers``    one program's memory, moved by a pager or by a daemon
``remedies``  what is far below what is usual, and what to do about it (pure)
``results``   rows, ratios and the JSON that programs read
``work``      what the workers do
"""
