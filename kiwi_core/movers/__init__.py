"""Movers: processes of a daemon that make every call to the driver or NVML that can hang.

A call about another process can hang for ever (a stopped target, a peer of NCCL, a bug), and then
it cannot be cancelled. So the daemon hands each call to a mover, which makes one at a time, and
awaits the answer for a limited time. A mover whose call passes its limit is killed. The driver
finishes the operation, and another mover can ask for the result.

The package itself imports nothing: a mover needs neither ``asyncio`` nor logging, and each daemon
starts several movers.
"""
