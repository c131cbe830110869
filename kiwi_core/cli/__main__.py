"""``python -m kiwi_core.cli``: the same as ``kiwi``, which need not be on the PATH."""

from __future__ import annotations

import sys

from kiwi_core.cli import main

sys.exit(main())
