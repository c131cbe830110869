"""Kiwi's metrics as Prometheus reads them: from a daemon's own listener, and from a Jupyter Server.

``reading`` asks daemons, ``families`` says what each number is called, ``collector`` puts both into
a ``prometheus_client`` registry, ``listener`` serves one over HTTP.
"""
