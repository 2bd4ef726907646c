"""A pytest plugin for one run: temporary folders that tests make themselves stay, in TMPDIR."""

from __future__ import annotations

import tempfile
from typing import Any

__all__ = ["pytest_configure"]


def pytest_configure() -> None:
    """Let `TemporaryDirectory` leave its folder when it is closed."""

    def keep(folder: Any) -> None:
        folder._finalizer.detach()

    tempfile.TemporaryDirectory.cleanup = keep  # type: ignore[method-assign]
