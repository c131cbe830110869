"""The hub of the laboratory. HUB_SPAWNER names the example in
integrations/jupyterhub/spawners that it loads; here is what differs from
a real hub: a password for all, and no certificates."""

import os
import sys

c = get_config()  # noqa: F821
kind = os.environ["HUB_SPAWNER"]
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.hub_bind_url = "http://0.0.0.0:8081"
c.JupyterHub.hub_connect_url = f"http://{os.uname().nodename}:8081"
c.ConfigurableHTTPProxy.command = ["/opt/kiwi/proxy/node_modules/.bin/configurable-http-proxy"]
c.ConfigurableHTTPProxy.auth_token = "0" * 64
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "kiwi"
c.Authenticator.allowed_users = {"kiwi-ada", "kiwi-bob"}
c.JupyterHub.services = [{"name": "check", "api_token": "t" * 40}]
c.JupyterHub.load_roles = [
    {
        "name": "check",
        "services": ["check"],
        "scopes": ["admin:users", "admin:servers", "access:servers", "tokens", "list:users"],
    }
]
c.Spawner.start_timeout = 90
c.Spawner.http_timeout = 60
load_subconfig(f"{os.environ['HUB_EXAMPLES']}/{kind}.py")  # noqa: F821

if os.environ.get("HUB_CULLS"):  # Jupyter's idle culler, as its documentation has it, but quick
    cull = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=30", "--cull-every=2"]
    c.JupyterHub.services.append({"name": "cull-idle", "command": cull})
    scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    c.JupyterHub.load_roles.append({"name": "cull", "services": ["cull-idle"], "scopes": scopes})
    c.Spawner.environment["JUPYTERHUB_ACTIVITY_INTERVAL"] = "2"
