"""A hub that submits each server to Slurm (batchspawner), into the partition that shares GPUs.

The weights of the nodes are the waits: integrations/slurm/kiwi_health_check writes them.
"""

import batchspawner  # noqa: F401 (registers a handler with the hub)

import kiwi_jupyterhub as hub

PARTITION = "notebooks"

c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.Spawner.cmd = ["/opt/kiwi/bin/jupyterhub-singleuser"]
# Both are needed: the first lets srun pass the PATH on, into which sudo has put its own before.
c.Spawner.environment = {"PATH": "/opt/kiwi/bin:/usr/bin:/bin"}
c.BatchSpawnerBase.req_prologue = "export PATH=/opt/kiwi/bin:/usr/bin:/bin"
c.BatchSpawnerBase.req_partition = PARTITION
c.BatchSpawnerBase.req_nprocs = "1"
c.BatchSpawnerBase.req_runtime = "8:00:00"
# job_submit.lua turns this into a part of a GPU, and adds RAM for memory that is moved out.
c.SlurmSpawner.req_gres = "gpu:1"
c.BatchSpawnerBase.exec_prefix = "sudo -E -u {username}"

hub.OptionsPage(lambda: hub.waits_of_slurm(PARTITION), hub.on_slurm_node).install(c)
