"""The Jupyter Server extension: REST interface and stream for JupyterLab, Notebook and scripts.

``app`` wires it up; ``routes`` has every route; ``daemon_connections`` holds the one connection to
each daemon; ``to_rest`` turns its status into what readers get; ``state_feed`` keeps the state and
hands changes to every reader; ``model`` is the shape of all that is said (``docs/rest.md``).
"""
