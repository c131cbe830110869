"""Move the GPU memory of processes out to system RAM and back in."""
