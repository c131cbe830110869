"""A hub in Kubernetes, with Kiwi's chart in the cluster. The image of the hub has kiwi-jupyter
installed, and so has that of the servers. For Zero to JupyterHub the same settings are values:
integrations/kubernetes/zero-to-jupyterhub.yaml."""

import kiwi_jupyterhub as hub

# The label kubernetes.io/hostname of each node, and an address that the hub reaches: Kiwi's chart
# with metrics.hostPort: 9402.
NODES = {
    "gpu-node-1": "http://10.0.0.11:9402/metrics",
    "gpu-node-2": "http://10.0.0.12:9402/metrics",
}


def prefer(weight: int, wait_below_s: int) -> dict:
    """Prefer nodes with a shorter wait, by the label that Node Feature Discovery makes. All weights
    that fit are added up."""
    short = {"key": "kiwi-jupyter/wait-s", "operator": "Lt", "values": [str(wait_below_s)]}
    return {"weight": weight, "preference": {"matchExpressions": [short]}}


c = get_config()  # noqa: F821
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.KubeSpawner.image = "registry.example.org/notebook-with-kiwi:0.1.0"
# A place on a GPU: Kiwi's device plugin hands out the GPU and the socket, without any privilege.
c.KubeSpawner.extra_resource_limits = {"kiwi-jupyter/gpu": "1"}
# GPU memory that is moved out counts in the pod: the user's own RAM and a whole GPU.
c.KubeSpawner.mem_limit = "96G"
c.KubeSpawner.mem_guarantee = "16G"
c.KubeSpawner.node_affinity_preferred = [prefer(50, 1), prefer(30, 30), prefer(20, 120)]

hub.OptionsPage(hub.waits_of_metrics(NODES), hub.on_kubernetes_node).install(c)
