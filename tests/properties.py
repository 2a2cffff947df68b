"""How many examples a property is tried on: the same few in each run of `make test`, ten times as many, and new ones,
where HYPOTHESIS_PROFILE is "many", as in `make test-slow`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

MANY = os.environ.get("HYPOTHESIS_PROFILE") == "many"
USUAL = 100


def examples(number: int = USUAL) -> settings:
    """No time limit an example: the machines that run them are busy."""
    checks = [HealthCheck.too_slow]
    return settings(
        max_examples=number * (10 if MANY else 1), derandomize=not MANY, deadline=None, suppress_health_check=checks
    )
