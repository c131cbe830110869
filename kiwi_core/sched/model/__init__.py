"""The scheduler's records: sessions, the state of the GPU, learned values and sums."""
