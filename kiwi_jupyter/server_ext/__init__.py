"""The Jupyter Server extension: REST interface and stream for JupyterLab, Notebook and scripts.

``app`` wires it up; ``routes`` has every route; ``daemon_connections`` holds the one connection to
each daemon; ``to_rest`` converts its status to the form of the REST interface; ``state_feed`` keeps
the state and passes changes to every reader; ``model`` has the structs of all messages
(``docs/rest.md``).
"""
