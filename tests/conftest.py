"""What every test of the project shares: how Hypothesis draws."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",  # the same examples each time, and no word about seconds: machines that run tests are busy
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("steady")
