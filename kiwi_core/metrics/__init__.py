"""Kiwi's metrics for Prometheus, served by a daemon's own listener and by a Jupyter Server.

``reading`` asks daemons, ``families`` names each number, ``collector`` puts both into
a ``prometheus_client`` registry, ``listener`` serves one over HTTP.
"""
