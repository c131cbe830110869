"""Black-box tests: the installed ``kiwi`` command, real kernels, a real Jupyter server, sockets.

They import nothing of Kiwi (a test in tests/tooling checks this), and use only what a user can
know.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
