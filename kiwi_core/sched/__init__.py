"""The pure scheduler of one GPU: events in, actions out; no clock, no socket, no thread.

``events`` and ``actions`` are the vocabulary, ``scheduler.Scheduler`` is the interface.

==========================  =======================================================================
``model/``                  the sessions, the state of the GPU, and the counts derived from them
``policy/``                 which session is next, which is paged out, for how long one runs
``rules/arrivals``,
``rules/observations``,
``rules/outcomes`` …        one function per event, which only records what happened
``rules/settle``,
``rules/turns``,
``rules/room`` …            the settle pass after each event, which decides
``rules/orders``            one function per action
``forecast/``               expected waits, found by running a copy of the state ahead
``view``                    what users are shown
``audit``                   recomputes every derived value from scratch
``replay``                  feeds a recorded journal to a fresh scheduler
==========================  =======================================================================
"""
