"""The records of the scheduler: sessions, the state of the GPU, what is learned and summed."""
