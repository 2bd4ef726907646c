"""The samples of one table for the status page: rows written and read, lake lag of the buckets.

Ten minutes of samples in one array of whole numbers: a thousand tables of four buckets take 7 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

__all__ = ["SAMPLES_MAX", "SPARK_SAMPLES", "TableHistory"]

SAMPLES_MAX: Final = 120
"""Samples kept of each table."""
SPARK_SAMPLES: Final = 5
"""The number of samples for a point of a short history."""

_AT, _WRITTEN, _READ, _LAGS = range(4)


class TableHistory:
    """The samples of one table, the oldest first."""

    def __init__(self, bucket_count: int) -> None:
        self._width = _LAGS + bucket_count
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values) // self._width

    def add(self, *, at_us: int, written_rows: int, read_rows: int, lag_ms: Sequence[int]) -> None:
        """Add a sample; beyond the limit, remove the oldest sample."""
        assert len(lag_ms) == self._width - _LAGS, lag_ms
        self._values.extend((at_us, written_rows, read_rows, *lag_ms))
        if len(self) > SAMPLES_MAX:
            del self._values[: self._width]

    @property
    def last_rows(self) -> tuple[int, int] | None:
        """The newest sample's rows ever written and read; None without a sample."""
        if not self._values:
            return None
        begin = len(self._values) - self._width
        return self._values[begin + _WRITTEN], self._values[begin + _READ]

    @property
    def last_lags_ms(self) -> Sequence[int]:
        """The newest sample's lag of each bucket; empty without a sample."""
        return self._values[len(self._values) - self._width + _LAGS :] if self._values else ()

    def lags_ms(self) -> list[list[int]]:
        """Return the lag of each bucket, sample by sample."""
        return [
            self._values[begin + _LAGS : begin + self._width].tolist()
            for begin in range(0, len(self._values), self._width)
        ]

    def written_per_s(self) -> list[float]:
        """Return the rows written a second, between consecutive samples."""
        return self._rates(_WRITTEN, 1)

    def read_per_s(self) -> list[float]:
        """Return the rows read a second, between consecutive samples."""
        return self._rates(_READ, 1)

    def last_per_s(self) -> tuple[float, float]:
        """Return the latest rates of rows written and read; 0 with fewer than two samples."""
        count = len(self)
        if count < 2:
            return 0.0, 0.0
        return self._rate(_WRITTEN, count - 2, count - 1), self._rate(_READ, count - 2, count - 1)

    def written_per_s_short(self) -> list[float]:
        """Return the rows written a second by the half minute; empty without any rows."""
        values, width = self._values, self._width
        if not values or values[_WRITTEN] == values[len(values) - width + _WRITTEN]:
            return []
        return self._rates(_WRITTEN, SPARK_SAMPLES)

    def _rates(self, column: int, step: int) -> list[float]:
        # The newest sample ends the last step; an incomplete step at the beginning is dropped.
        last = len(self) - 1
        ends = range(last % step + step, last + 1, step) if last > 0 else ()
        if not ends and last > 0:
            return [self._rate(column, 0, last)]
        return [self._rate(column, end - step, end) for end in ends]

    def _rate(self, column: int, begin: int, end: int) -> float:
        values, first, last = self._values, begin * self._width, end * self._width
        us = max(values[last + _AT] - values[first + _AT], 1_000)
        return (values[last + column] - values[first + column]) * 1e6 / us
