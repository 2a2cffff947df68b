"""Property tests have no time limit an example: the machines that run them are busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("tenplexrun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tenplexrun")
