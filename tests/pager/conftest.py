from __future__ import annotations

import sys
from pathlib import Path

# Where every backend's tests find the contract and the programs under test.
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))
