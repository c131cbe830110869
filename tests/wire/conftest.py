from __future__ import annotations

from hypothesis import HealthCheck, settings

# The time that an example takes depends on the machine more than on the code.
settings.register_profile("kiwi-wire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kiwi-wire")
