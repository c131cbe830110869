"""The daemon of one GPU: it carries out the scheduler's orders and reports events to it.

==============  =================================================================================
``supervisor``  starts one process for each GPU, and restarts those that crash
``gpu_daemon``  runs such a process, and ends it; ``assembly`` puts its parts together
``router``      hands each message of a client to the part that answers it
``reports/``    status, usage, metrics, and the messages to waiters and watchers
``sessions/``   sessions, their bursts and requests, their libraries, recovery, shutdown
``engine/``     ``core`` feeds events to the scheduler and publishes the steps; operations, journal
``links/``      the preloaded libraries, and the system RAM that they may hold
``user_texts``  the texts for users: what happened to a session, why, and what to do
``roster/``     the session registry, and the file that remembers it
``base/``       sockets, connections, peers, shares
==============  =================================================================================

Imports go downwards only, including those for types.
"""
