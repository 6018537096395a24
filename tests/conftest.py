"""Settings that all tests share."""

import os

import pytest
import structlog
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=150, stateful_step_count=60)
settings.register_profile("thorough", deadline=None, max_examples=1000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def logs_of_no_other_test() -> None:
    """What a test run before this one, a daemon in this process, made of the log lines does not count."""
    structlog.reset_defaults()
