"""The disk under a log that a test opens."""

from __future__ import annotations

import pytest

from tests.support.crash_filesystem import CrashFilesystem


@pytest.fixture
def disk() -> CrashFilesystem:
    return CrashFilesystem(0)
