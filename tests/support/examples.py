"""How many examples a property gets: few for every change, many in `make thorough`."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

__all__ = ["examples"]

_DEFAULT: Final = 50


def examples(count: int) -> int:
    """Return `count`, or its share of the examples of the profile that conftest.py has loaded."""
    assert settings.default is not None
    return max(count * settings.default.max_examples // _DEFAULT, 1)
