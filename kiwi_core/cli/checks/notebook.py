"""Checks that Kiwi is active in the notebooks of this Python environment."""

from __future__ import annotations

import os
import site
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.cli.checks.finding import Finding, UnansweredError, fail, ok, probe, warn
from kiwi_core.config import ENV_DISABLE, is_disabled
from kiwi_core.environments import CONFIG_NAME, EXTENSION

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE: Final = """
import json, os
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp()
if os.path.isdir(os.path.join(app.ipython_dir, "profile_default")):
    app.init_profile_dir()
app.init_config_files()
app.load_config_file(suppress_errors=True)
extensions = app.config.InteractiveShellApp.extra_extensions
# Only appended to, it is still lazy: what is appended goes to the default, an empty list.
extensions = extensions.get_value([]) if hasattr(extensions, "get_value") else extensions
print(json.dumps(list(extensions)))
"""


def check(prefix: Path | None = None) -> Iterator[Finding]:
    """Yield the findings. ``prefix`` is the environment's root (default: this Python's)."""
    prefix = Path(sys.prefix) if prefix is None else prefix
    if find_spec("kiwi_jupyter") is None:
        yield fail(
            "notebook",
            f"kiwi_jupyter is not installed in {prefix}: its notebooks do not take part.",
            "Install Kiwi in the environment that the notebooks' kernels run in: "
            "pip install . in a checkout of it.",
        )
        return
    try:
        extensions = effective_extensions()
    except UnansweredError as error:
        yield configuration(prefix / "etc" / "ipython" / CONFIG_NAME)
        text = f"Could not find out which extensions a kernel loads here: {error}."
        yield warn("kernel", text, error.remedy)
    else:
        if EXTENSION not in extensions:
            yield configuration(prefix / "etc" / "ipython" / CONFIG_NAME)
        yield loaded(extensions)
    if is_disabled(os.environ):
        yield warn(
            "notebook",
            f"{ENV_DISABLE} is set: notebooks started from here do not use Kiwi.",
            f"unset {ENV_DISABLE}",
        )


def configuration(path: Path, *, for_one_user: bool | None = None) -> Finding:
    """Look at the configuration that comes with Kiwi. ``for_one_user``: Kiwi was installed with
    ``--user`` (default: look)."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    except OSError as error:
        return warn(
            "notebook",
            f"{path} cannot be read ({error.strerror}): kernels do not load Kiwi by themselves.",
            "Make it readable for everybody who uses this environment.",
        )
    if EXTENSION in text:
        return ok("notebook", f"{path} switches Kiwi on in every kernel of this environment")
    if installed_for_one_user() if for_one_user is None else for_one_user:
        return warn(
            "notebook",
            f"Kiwi is installed for you alone (--user). IPython reads no configuration there, and "
            f"{path} does not name {EXTENSION}: kernels do not load Kiwi by themselves.",
            f"Write c.InteractiveShellApp.extra_extensions.append({EXTENSION!r}) into "
            f"~/.ipython/profile_default/{CONFIG_NAME}, or install Kiwi in a virtual environment.",
        )
    return warn(
        "notebook",
        f"{path} does not name {EXTENSION}: kernels do not load Kiwi by themselves.",
        "Install again (pip install --force-reinstall --no-deps . in a checkout of Kiwi), or run "
        "%load_ext kiwi_jupyter.kernel in the notebook.",
    )


def installed_for_one_user() -> bool:
    """Return whether Kiwi lies in the user's own ``site-packages``."""
    spec = find_spec("kiwi_jupyter")
    own = Path(site.getusersitepackages())
    return spec is not None and own in Path(spec.origin or "").parents


def loaded(extensions: list[str]) -> Finding:
    """Judge the extensions that a kernel would load."""
    if EXTENSION in extensions:
        return ok("kernel", "a plain Python 3 kernel of this environment loads Kiwi")
    return warn(
        "kernel",
        f"A kernel would load {', '.join(extensions) or 'no extensions'}, not Kiwi. Usually a "
        "configuration of yours sets extra_extensions = [...] and so replaces Kiwi's.",
        f"There, write c.InteractiveShellApp.extra_extensions.append(...), or add {EXTENSION!r}.",
    )


def effective_extensions() -> list[str]:
    """Ask IPython itself, in a separate process, because it runs the user's configuration files, as
    each kernel does. Raise ``UnansweredError``.
    """
    return [str(word) for word in probe(_PROBE)]
