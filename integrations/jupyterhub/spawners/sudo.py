"""A hub that is not root: ``sudospawner`` starts each server as its user. Needs a rule for sudo:

Cmnd_Alias JUPYTER = /opt/kiwi/bin/sudospawner
Defaults:jupyterhub !requiretty
jupyterhub ALL=(%jupyter-users) NOPASSWD: JUPYTER
"""

import kiwi_jupyterhub as hub

c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "sudospawner.SudoSpawner"
c.SudoSpawner.sudospawner_path = "/opt/kiwi/bin/sudospawner"
c.Spawner.cmd = ["/opt/kiwi/bin/jupyterhub-singleuser"]
c.Spawner.environment = {"PATH": "/opt/kiwi/bin:/usr/bin:/bin"}

hub.OptionsPage(hub.waits_of_this_machine, hub.on_gpu).install(c)
