"""Subscriptions against a real service: kills, takeovers, closing, committed positions."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import LogBatch
from streamhouse.core.errors import InvalidRequestError
from tests.support.moved_service import MovedService, OwnedService
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TABLE = "default.t"


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


def _ids(batches: list[LogBatch]) -> list[int]:
    return [i for batch in batches for i in batch.data.column("id").to_pylist()]


@pytest.mark.parametrize("service_type", [MovedService, OwnedService])
def test_a_committed_position_survives_a_kill_and_a_takeover(
    tmp_path: Path, service_type: type[MovedService | OwnedService]
) -> None:
    with service_type(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(TABLE, SCHEMA)
        for start in range(0, 50, 10):
            client.append(TABLE, _rows(start, start + 10))

        with client.subscribe(TABLE, start="committed", consumer="billing") as batches:
            read = list(itertools.islice(batches, 2))
            # A new consumer is saved at once; it is this one that has to be, as well.
            batches.commit()
            read += itertools.islice(batches, 2)
            # What was not committed comes again: it may not have been done.
        assert _ids(read) == list(range(40))
        service.move()
        assert client.committed(TABLE, "billing") == {0: 20}
        with client.subscribe(TABLE, start="committed", consumer="billing") as batches:
            again = list(itertools.islice(batches, 3))
            batches.commit()
        assert _ids(again) == list(range(20, 50))
        assert client.committed(TABLE, "billing") == {0: 50}
        assert client.committed(TABLE, "nobody") is None


def test_several_tables_are_followed_over_a_kill_and_closed_while_waiting(tmp_path: Path) -> None:
    tables = ["default.a", "default.b"]
    with MovedService(tmp_path) as service:
        client = StreamhouseClient(service.endpoint)
        for table in tables:
            client.create_table(table, SCHEMA)
        found: dict[str, list[int]] = {table: [] for table in tables}
        all_found, ended = threading.Event(), threading.Event()
        batches = client.subscribe(tables, start="earliest")

        def follow() -> None:
            for batch in batches:
                found[batch.table] += _ids([batch])
                if sum(map(len, found.values())) == 80:
                    all_found.set()
            ended.set()

        threading.Thread(target=follow, daemon=True).start()
        for start in range(0, 40, 10):
            for table in tables:
                client.append(table, _rows(start, start + 10))
            if start == 10:
                service.move()
        assert all_found.wait(60)
        assert found == {table: list(range(40)) for table in tables}

        # It waits for rows now, and its client ends it.
        client.close()
        assert ended.wait(60)
        with pytest.raises(InvalidRequestError, match=r"the subscription to .* is closed"):
            batches.poll(0)
        with pytest.raises(InvalidRequestError, match=r"the client of http.* is closed; make"):
            client.append(TABLE, _rows(0, 1))


def test_a_full_subscription_is_polled_closed_while_waiting_and_commits_nothing(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(TABLE, SCHEMA)
        client.append(TABLE, _rows(0, 10))
        with client.subscribe([TABLE], start="full") as batches:
            [batch] = batches.poll(60)
            assert (batch.table, batch.data.num_rows) == (TABLE, 10)
            assert batches.poll(0.01) == []
            with pytest.raises(InvalidRequestError, match="keep the 'token' of the last batch"):
                batches.commit()
            # The service holds the poll for seconds; nobody waits for that.
            waiter = threading.Thread(target=lambda: list(batches))
            waiter.start()
        waiter.join(60)
        assert not waiter.is_alive()
        with pytest.raises(InvalidRequestError, match="'consumer' is empty"):
            client.subscribe("t", consumer="")
        with pytest.raises(InvalidRequestError, match="start='committed' needs a 'consumer'"):
            client.subscribe(TABLE, start="committed")
