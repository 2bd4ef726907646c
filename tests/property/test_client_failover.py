"""Whatever happens to requests and whoever is the owner: each row is stored once, nobody errs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.client import Producer, StorageClient
from streamhouse.core.backoff import Backoff
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from tests.support.examples import examples
from tests.support.moving_service import Fault, MovingService, Turn

PROCESSES: Final = 3
SCHEMA: Final = pa.schema([pa.field("id", pa.int64(), nullable=False)])
TABLE: Final = TableInfo(
    descriptor=TableDescriptor(
        path=TablePath.parse("t"),
        schema=Schema.from_arrow(SCHEMA),
        bucket_count=2,
        bucket_key=("id",),
    ),
    table_id=1,
    created_at_us=0,
)

_turns = st.lists(
    st.builds(Turn, st.sampled_from(Fault), st.integers(0, PROCESSES - 1)), max_size=25
)
_listed = st.lists(st.integers(0, PROCESSES - 1), min_size=1, max_size=PROCESSES, unique=True)


@contextmanager
def _world(listed: list[int]) -> Iterator[tuple[MovingService, StorageClient]]:
    with MovingService(TABLE, processes=PROCESSES) as service:
        urls = ",".join(service.endpoints[number] for number in listed)
        with StorageClient(urls) as client:
            client.transport.routes.backoff = Backoff(first_s=0.0005, most_s=0.002)
            # Of one endpoint alone, a service that was never reached may be misspelt.
            client.describe_table("t")
            yield service, client


def _rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": list(range(start, end))}, schema=SCHEMA)


@settings(max_examples=examples(60), deadline=None)
@given(listed=_listed, turns=_turns, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_each_row_of_each_append_is_stored_once_where_the_call_says(
    listed: list[int], turns: list[Turn], sizes: list[int]
) -> None:
    with _world(listed) as (service, client):
        service.play(turns)
        at = 0
        found: dict[tuple[int, int], set[int]] = {}
        for size in sizes:
            ranges = client.append("t", _rows(at, at + size))
            found[at, at + size] = {
                row for b, (start, end) in ranges.items() for row in service.stored[b][start:end]
            }
            at += size
            assert client.count("t") == at

    assert sorted(row for log in service.stored.values() for row in log) == list(range(at))
    for (start, end), stored in found.items():
        assert stored == set(range(start, end))


@settings(max_examples=examples(40), deadline=None)
@given(listed=_listed, turns=_turns)
def test_a_producer_goes_on_under_its_sequence(listed: list[int], turns: list[Turn]) -> None:
    with _world(listed) as (service, client):
        service.play(turns)
        with Producer(client, "t", linger_ms=0, batch_rows=3) as producer:
            futures = [producer.send(_rows(at, at + 2)) for at in range(0, 30, 2)]
        for future in futures:
            future.result(timeout=0)

    assert sorted(row for log in service.stored.values() for row in log) == list(range(30))
    for log in service.stored.values():
        assert log == sorted(log)
