"""Kiwi in Jupyter: the kernel's cell hook (and, later, the server and lab extensions)."""
