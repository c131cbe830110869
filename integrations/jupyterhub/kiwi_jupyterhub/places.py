"""Put a user's server on the place that was chosen: one function for each kind of spawner.

Each function is called before the server starts, with the ``key`` of a place that exists; ``""``
means that the user leaves the choice to the batch system, or to Kiwi.
"""

from __future__ import annotations

from typing import Any

from kiwi_core.config import ENV_GPU


def on_gpu(spawner: Any, key: str) -> None:
    """For spawners that start servers on the hub's machine: all kernels use the GPU ``key``. With
    no choice Kiwi places each kernel when it starts."""
    spawner.environment = {name: v for name, v in spawner.environment.items() if name != ENV_GPU}
    if key:
        spawner.environment[ENV_GPU] = key


def on_slurm_node(spawner: Any, key: str) -> None:
    """For ``batchspawner.SlurmSpawner``: the job runs on the node ``key``. With no choice Slurm
    takes the node with the lowest weight that has room."""
    spawner.req_options = f"--nodelist={key}" if key else ""


def on_kubernetes_node(spawner: Any, key: str) -> None:
    """For ``kubespawner.KubeSpawner``: the pod runs on the node ``key``. With no choice the
    scheduler of the cluster decides."""
    label = "kubernetes.io/hostname"
    spawner.node_selector = {
        name: value for name, value in spawner.node_selector.items() if name != label
    }
    if key:
        spawner.node_selector[label] = key
