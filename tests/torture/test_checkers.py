"""The judges of torture take a cut as a whole, however often a read of it fails."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnavailableError
from tests.torture.checkers import LogImage

_ROWS = 4


class _Client:
    """Two buckets of rows; the first page of the first read is answered, the second is not."""

    def __init__(self) -> None:
        self.is_away = True

    def table_state(self, _table: str) -> Any:
        positions = SimpleNamespace(high_watermark=_ROWS)
        return SimpleNamespace(positions={0: positions, 1: positions})

    def read_range(
        self, _table: str, _bucket: int, start: int, end: int, **_: Any
    ) -> Iterator[Any]:
        for offset in range(start, end):
            if self.is_away and offset > start:
                raise UnavailableError("away")
            data = pa.RecordBatch.from_pydict({"writer": [1], "number": [offset]})
            yield SimpleNamespace(base_offset=offset, data=data)


def test_a_read_that_fails_half_way_is_made_again() -> None:
    client: Any = _Client()
    image = LogImage("events")
    with pytest.raises(UnavailableError):
        image.extend(client)

    client.is_away = False
    news = image.extend(client)

    rows = [(1, number) for number in range(_ROWS)]
    assert news == {0: rows, 1: rows}
    assert image.buckets == {0: rows, 1: rows}
    assert image.counts == dict.fromkeys(rows, 2)
