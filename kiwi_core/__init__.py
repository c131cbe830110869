"""Kiwi's core: scheduler, protocol, pager, daemon and command line."""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"

# A wheel has the emulated driver and the device plugin beside this package, a checkout in folders
# of their own. So a checkout on PYTHONPATH works without being installed.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for _package in ("emulator/kiwi_emulator", "integrations/kubernetes/kiwi_kubernetes"):
    _folder = os.path.join(_ROOT, os.path.dirname(_package))
    if _folder not in sys.path and os.path.isdir(os.path.join(_ROOT, _package)):
        sys.path.append(_folder)
