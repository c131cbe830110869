"""A hub on the machine that has the GPUs; the hub runs as root and starts a server as each user."""

import kiwi_jupyterhub as hub

c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"
c.Spawner.cmd = ["/opt/kiwi/bin/jupyterhub-singleuser"]
# Servers and kernels find the daemon of the machine in /run/kiwi; nothing else is needed for Kiwi.
c.Spawner.environment = {"PATH": "/opt/kiwi/bin:/usr/bin:/bin"}

hub.OptionsPage(hub.waits_of_this_machine, hub.on_gpu).install(c)
