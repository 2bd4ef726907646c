"""A scan has few rows in memory, and closing it ends all that it has begun."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidRequestError, OffsetOutOfRangeError
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan._splits_read import read_splits, stream_splits
from streamhouse.reading.plan.pinned_table import TableScan
from streamhouse.reading.scan.scan import RowsPiece, ScanContext, Split
from tests.support.scan_context import scan_context

SCHEMA = pa.schema([pa.field("n", pa.int64())])
CONTEXT = scan_context()
CLIENT = cast(StorageClient, None)


def _plan(count: int) -> ReadPlan:
    """Splits that `_Source` reads by their number."""
    pieces = [RowsPiece(stream=str(number).encode(), row_count=0) for number in range(count)]
    return ReadPlan(context=CONTEXT, splits=[Split((piece,)) for piece in pieces])


class _Source:
    """Splits of ten batches of one row each; remembers what was read and what is open."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.read = 0
        self.open = 0
        self._fails_in = fails_in
        self._lock = threading.Lock()

    def __call__(self, split: Split, context: ScanContext, *, client: Any) -> Iterator[Any]:
        piece = split.pieces[0]
        assert isinstance(piece, RowsPiece)
        number = int(piece.stream)
        with self._opened():
            for index in range(10):
                if number == self._fails_in and index == 5:
                    raise OffsetOutOfRangeError("rows left the log")
                with self._lock:
                    self.read += 1
                yield _batch(number * 10 + index)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            self.open += 1
        try:
            yield
        finally:
            with self._lock:
                self.open -= 1


def _batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def _threads() -> Sequence[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("streamhouse-read")]


@pytest.fixture
def source() -> _Source:
    return _Source()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_all_rows_are_read_once_and_in_order_when_all_are_read(source: _Source, count: int) -> None:
    plan = _plan(count)

    ordered = [batch["n"][0].as_py() for batch in read_splits(CLIENT, plan, read=source)]
    streamed = [batch["n"][0].as_py() for _, batch in stream_splits(CLIENT, plan, read=source)]

    assert ordered == sorted(streamed) == list(range(10 * count))
    assert (_threads(), source.open) == ([], 0)


@pytest.mark.parametrize("count", [1, 40])
def test_closing_ends_threads_and_what_they_have_open(source: _Source, count: int) -> None:
    batches = stream_splits(CLIENT, _plan(count), read=source)
    scan = TableScan(SCHEMA, (batch for _, batch in batches))
    with scan:
        next(scan)
    del batches

    # At most eight threads, each with one batch ready and one in its hands.
    assert source.read <= 1 + 3 * 8
    assert (_threads(), source.open) == ([], 0)
    scan.close()
    with pytest.raises(InvalidRequestError, match="this scan is closed"):
        scan.read_all()


def test_a_scan_that_nobody_has_any_more_is_closed(source: _Source) -> None:
    scan = TableScan(SCHEMA, (batch for _, batch in stream_splits(CLIENT, _plan(5), read=source)))
    assert scan.read_next_batch().num_rows == 1

    del scan

    assert (_threads(), source.open) == ([], 0)


def test_an_error_ends_the_scan() -> None:
    source = _Source(fails_in=3)

    with pytest.raises(OffsetOutOfRangeError, match="rows left the log"):
        list(stream_splits(CLIENT, _plan(40), read=source))

    assert (_threads(), source.open) == ([], 0)


def test_what_takes_arrow_streams_takes_a_scan() -> None:
    def scan() -> TableScan:
        return TableScan(SCHEMA, (batch for batch in [_batch(1, 2), _batch(3)]))

    assert pa.table(scan()).column("n").to_pylist() == [1, 2, 3]
    assert pa.RecordBatchReader.from_stream(scan()).read_all().num_rows == 3
    assert pa.Table.from_batches(scan()).num_rows == 3
    assert scan().read_all().schema == SCHEMA
    assert repr(scan()) == "TableScan(n)"


def test_one_plan_is_read_twice(source: _Source) -> None:
    plan = _plan(3)
    first, second = (
        stream_splits(CLIENT, plan, read=source),
        stream_splits(CLIENT, plan, read=source),
    )
    next(first)
    assert len(list(second)) == 30
    assert len(list(first)) == 29
