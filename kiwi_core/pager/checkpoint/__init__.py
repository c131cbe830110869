"""Moves memory by the driver's checkpoint calls, from outside, on unmodified programs."""
