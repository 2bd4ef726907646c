"""Cache keys by object identity, for values whose comparison is slow."""

from __future__ import annotations

from typing import Any

__all__ = ["Same"]


class Same:
    """A cache key, equal only for the same object, which must never change."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
