"""A hub in Kubernetes (Zero to JupyterHub: ``hub.extraConfig``). The nodes' daemons publish their
metrics; the image of the hub has kiwi-jupyter installed, that of the servers, too."""

from kiwi_jupyter import hub

NODES = {name: f"http://{name}:9402/metrics" for name in ("gpu-node-1", "gpu-node-2")}

c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
# Kiwi has no device plugin yet: another one must offer several places on a GPU, and the cluster
# must mount the daemon's socket into the pod (by CDI: kiwi doctor --print cdi).
c.KubeSpawner.extra_resource_limits = {"nvidia.com/gpu": "1"}
# GPU memory that is moved out counts in the pod: the user's own RAM and a whole GPU.
c.KubeSpawner.mem_limit = "96G"
c.KubeSpawner.mem_guarantee = "16G"

hub.OptionsPage(hub.waits_of_metrics(NODES), hub.on_kubernetes_node).install(c)
