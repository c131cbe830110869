"""Move the memory of unmodified programs, from outside, by the driver's checkpoint calls."""
