return {
  partitions = { notebooks = true },
  default_partition = "",
  gres = "shard:1",
  gpu_mb = 512,
  program_mb = 600,
}
