"""Loads Kiwi in every IPython kernel of this environment. Installed with the wheel."""

import importlib.util

# A kernel must start even where Kiwi's package was removed and this file was left behind.
if importlib.util.find_spec("kiwi_jupyter") is not None:
    c.InteractiveShellApp.extra_extensions.append("kiwi_jupyter.kernel")  # noqa: F821
