from __future__ import annotations

from hypothesis import settings
from untimed import UNTIMED

settings.register_profile("kiwi-wire", UNTIMED)
settings.load_profile("kiwi-wire")
