"""What a write answers: where its rows are in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Appended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Where the rows of one write are: bucket -> (start, end).

    Of an upsert or delete these are its changes; a bucket in which nothing changed has an empty
    range.
    """

    ranges: Mapping[int, tuple[int, int]]
    timestamp_us: int
