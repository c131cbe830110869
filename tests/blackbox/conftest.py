"""Black-box tests: the installed ``kiwi`` command, real kernels, a real Jupyter server, sockets.

Nothing of Kiwi is imported here (a test in tests/tooling sees to it): what these tests know, a user
can know.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
