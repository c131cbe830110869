"""``kiwi bench``: what this machine can do, and how far Kiwi is from it.

The process that the user started only conducts: it loads no driver. Everything that uses the GPU
is a separate process (``worker``). It gets one JSON line per order, with a time limit for each.
When its input ends, it frees everything and ends, so that nothing outlives a killed bench.

``plan``      how much is used of everything, and how large the pieces are (pure)
``limits``    the machine: copies and the cheapest driver call
``distance``  Kiwi: the lease, and for each of ``backends`` the moves, both through a daemon
``moves``     page-out, page-in and switch of programs with one backend
``remedies``  results far below the usual ones, and what to do about them (pure)
``results``   rows, ratios and the JSON that programs read
``work``      what the workers do
"""
