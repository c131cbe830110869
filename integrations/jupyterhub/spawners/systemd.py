"""A hub on the machine that has the GPUs; systemd starts each server as a unit with limits."""

import kiwi_jupyterhub as hub

c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "systemdspawner.SystemdSpawner"
c.Spawner.cmd = ["/opt/kiwi/bin/jupyterhub-singleuser"]
c.Spawner.environment = {"PATH": "/opt/kiwi/bin:/usr/bin:/bin"}
# GPU memory that is moved out counts in the unit: the user's own RAM and a whole GPU.
c.SystemdSpawner.mem_limit = "96G"
# The GPU is a device, and the driver has files in /tmp.
c.SystemdSpawner.isolate_devices = False
c.SystemdSpawner.isolate_tmp = False

hub.OptionsPage(hub.waits_of_this_machine, hub.on_gpu).install(c)
