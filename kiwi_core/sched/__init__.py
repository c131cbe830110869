"""The pure scheduler of one GPU: events in, actions out; no clock, no socket, no thread.

``events`` and ``actions`` are the vocabulary, ``scheduler.Scheduler`` is the interface.

==========================  =======================================================================
``model/``                  the sessions, the state of the GPU, and the books that follow from them
``policy/``                 who is next, who goes out, for how long
``rules/arrivals``,
``rules/observations``,
``rules/outcomes`` …        one function per event, which only records what happened
``rules/settle``,
``rules/turns``,
``rules/room`` …            one pass after each event, which decides
``rules/orders``            one function per action
``forecast/``               expected waits: a copy of the state runs ahead
``snapshot``, ``view``      what people are shown
``audit``                   recomputes every derived value from scratch
``replay``                  sends a recorded journal through a fresh scheduler
==========================  =======================================================================
"""
