"""For ``jupyterhub_config.py``: an options page that shows where the wait for a GPU is shortest.

    import kiwi_jupyterhub as hub

    hub.OptionsPage(hub.waits_of_slurm, hub.on_slurm_node).install(c)

The first argument returns the places, the second puts a server on the chosen one. This package
needs neither JupyterHub nor a GPU: it only hands functions to the hub's configuration.
"""

from __future__ import annotations

from kiwi_jupyterhub.page import OptionsPage
from kiwi_jupyterhub.places import on_gpu, on_kubernetes_node, on_slurm_node
from kiwi_jupyterhub.waits import (
    Place,
    slurm_weight,
    waits_of_metrics,
    waits_of_slurm,
    waits_of_this_machine,
)

__all__ = [
    "OptionsPage",
    "Place",
    "on_gpu",
    "on_kubernetes_node",
    "on_slurm_node",
    "slurm_weight",
    "waits_of_metrics",
    "waits_of_slurm",
    "waits_of_this_machine",
]
