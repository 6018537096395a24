"""Settings that all tests share."""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=150, stateful_step_count=60)
settings.register_profile("thorough", deadline=None, max_examples=1000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
