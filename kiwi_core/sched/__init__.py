"""The pure scheduler of one GPU: events in, actions out; no clock, no socket, no thread.

``events`` and ``actions`` are the vocabulary, ``scheduler.Scheduler`` the door. Inside:

==================================  =============================================================
``session``, ``state``              the records, and the books that follow from them
``needs``, ``speed``                what is learned: expected memory, speed of swaps
``arrivals``, ``observations``,
``outcomes``                        one function per event: they only record what happened
``settle``, ``turns``, ``room``     one pass after each event: they decide
``orders``                          one function per action: they order
``policy/``                         who is next, who goes out, for how long
``snapshot``, ``view``, ``story``,
``accounts``                        what people are shown
``outlook``, ``likely``,
``futures``, ``ahead``, ``twin``,
``waits``                           expected waits: a copy runs ahead
``audit``                           recomputes everything derived from scratch
``replay``, ``moved``               a recorded journal through a fresh scheduler; sums of moves
==================================  =============================================================
"""
