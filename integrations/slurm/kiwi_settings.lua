-- What Kiwi's Slurm plugins must know of this cluster. Edit this file; the other ones stay as they are.
return {
  -- Partitions whose GPUs are shared through Kiwi: a job there gets a part of a GPU instead of a whole one.
  partitions = { notebooks = true },
  -- The partition of a job that names none.
  default_partition = "",
  -- What a job gets for each GPU that it asks for.
  gres = "shard:1",
  -- MB of memory that a GPU of these partitions has. All of it may be moved to the job's RAM.
  gpu_mb = 81920,
  -- MB of RAM for the program itself.
  program_mb = 8192,
}
