"""What every test needs. Fixtures of one part live beside that part's tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.support.python_process import end_forking, fork_from_now_on

# No deadline: two shared cores make one slow example likely, and it says nothing about the code.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that runs a test that is a coroutine."""
    return "asyncio"


def pytest_configure() -> None:
    fork_from_now_on()


def pytest_unconfigure() -> None:
    end_forking()
