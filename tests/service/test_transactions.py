"""Transactions of a running service: staged by many, seen at once, once, also after kill -9."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient, Transaction, TransactionStatus
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    TransactionClosedError,
    TransactionNotFoundError,
    UnsupportedError,
)
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(start: int, end: int, name: str = "n") -> pa.Table:
    ids = list(range(start, end))
    return pa.table({"id": ids, "name": [f"{name}{i}" for i in ids]}, schema=SCHEMA)


def _create(client: StorageClient, path: str) -> str:
    """Make the log table `events` or the primary key table `rows`; return what it is written by."""
    client.create_table(path, SCHEMA, bucket_count=3, primary_key=("id",) if path == "rows" else ())
    return "upsert" if path == "rows" else "append"


def _log(client: StorageClient, path: str) -> list[tuple[int, str]]:
    """Return (id, name) of all rows of the log, sorted."""
    found: list[tuple[int, str]] = []
    for bucket, positions in client.positions(path).items():
        for batch in client.read_range(path, bucket, 0, positions.high_watermark):
            rows = batch.data.to_pydict()
            found += zip(rows["id"], rows["name"], strict=True)
    return sorted(found)


def _sizes(client: StorageClient) -> list[tuple[int, int | None]]:
    found = []
    for bucket, positions in client.positions("events").items():
        for batch in client.read_range("events", bucket, 0, positions.high_watermark):
            found += zip(*batch.data.select(["id", "size"]).to_pydict().values(), strict=True)
    return sorted(found)


@pytest.mark.parametrize("path", ["events", "rows"])
def test_what_is_named_becomes_visible_at_once_and_nothing_else(
    client: StorageClient, path: str
) -> None:
    operation = _create(client, path)
    transaction = client.begin_transaction(path, operation=operation)
    first = transaction.stage(_rows(0, 100))
    with StorageClient(client.endpoint) as other:
        elsewhere = other.open_transaction(path, transaction.transaction_id)
        second = elsewhere.stage(_rows(100, 30_000))
        elsewhere.stage(_rows(90_000, 90_010))
    assert _log(client, path) == []
    assert transaction.status()["row_count"] == 30_010

    result = transaction.commit([second, first])

    assert result.status is TransactionStatus.COMMITTED
    assert result.row_count == 30_000
    assert sum(end - start for start, end in result.ranges.values()) == 30_000
    assert _log(client, path) == [(i, f"n{i}") for i in range(30_000)]
    assert transaction.commit([second, first]) == result
    assert transaction.abort() is TransactionStatus.COMMITTED
    assert transaction.status()["status"] == "committed"
    with pytest.raises(TransactionClosedError, match="other parts"):
        transaction.commit([first])
    with pytest.raises(TransactionClosedError, match="takes no more rows"):
        transaction.stage(_rows(0, 1))


@pytest.mark.parametrize("path", ["events", "rows"])
def test_a_version_is_committed_once_also_after_kill_9(tmp_path: Path, path: str) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        operation = _create(client, path)
        zombie = client.begin_transaction(path, operation=operation, app_id="app", version=7)
        late = zombie.stage(_rows(0, 10, "late"))
        with client.begin_transaction(path, operation=operation, app_id="app", version=7) as now:
            committed = now.commit([now.stage(_rows(0, 10))])
        staged = client.begin_transaction(path, operation=operation)
        part = staged.stage(_rows(10, 20))
        service.kill()

    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        again = client.begin_transaction(path, operation=operation, app_id="app", version=6)
        assert again.is_skipped
        assert again.commit([again.stage(_rows(0, 10))]).is_skipped
        assert client.open_transaction(path, now.transaction_id).status()["row_count"] == 10
        zombie = client.open_transaction(path, zombie.transaction_id)
        assert zombie.commit([late]).is_skipped
        assert zombie.commit([late]).is_skipped
        assert committed.row_count == 10
        client.open_transaction(path, staged.transaction_id).commit([part])
        assert _log(client, path) == [(i, f"n{i}") for i in range(20)]
        assert not client.begin_transaction(
            path, operation=operation, app_id="app", version=8
        ).is_skipped


def test_many_join_one_transaction_of_a_version(client: StorageClient) -> None:
    _create(client, "events")

    def begin(version: int, *, app_id: str = "app", join: bool = True) -> Transaction:
        return client.begin_transaction("events", app_id=app_id, version=version, join=join)

    with ThreadPoolExecutor(8) as pool:
        joined = list(pool.map(begin, [7] * 8))
        parts = list(pool.map(lambda each: each.stage(_rows(0, 10)), joined))
    assert len({each.transaction_id for each in joined}) == 1
    strangers = [begin(8), begin(7, app_id="other"), begin(7, join=False)]
    assert joined[0].transaction_id not in {each.transaction_id for each in strangers}
    strangers[2].abort()

    joined[3].commit(parts[:2])

    assert len(_log(client, "events")) == 20
    assert begin(7).is_skipped
    strangers[0].abort()
    assert begin(8).transaction_id != strangers[0].transaction_id, "it was aborted"
    with pytest.raises(InvalidRequestError, match="joined by its app_id and version"):
        client.begin_transaction("events", join=True)


def test_a_transaction_begins_with_the_table_as_it_is_now(client: StorageClient) -> None:
    _create(client, "events")
    with StorageClient(client.endpoint) as worker:
        worker.append("events", _rows(0, 1))  # It remembers the table from here on.
        client.alter_schema("events", [{"add": "size", "type": "bigint"}])
        rows = _rows(1, 3).append_column("size", pa.array([5, None], pa.int64()))

        with worker.begin_transaction("events", app_id="app", version=1) as transaction:
            transaction.commit([transaction.stage(rows)])

    assert _sizes(client) == [(0, None), (1, 5), (2, None)]


def test_partial_updates_deletes_and_change_streams(client: StorageClient) -> None:
    schema = pa.schema([*SCHEMA, pa.field("size", pa.int32())])
    client.create_table("rows", schema, primary_key=("id",), bucket_count=2)
    client.upsert(
        "rows", pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"], "size": [1, 2, 3]}, schema)
    )

    with client.begin_transaction("rows", operation="upsert", columns=["id", "size"]) as sizes:
        update = pa.table({"id": [1, 2, 4], "size": pa.array([10, 20, 40], pa.int32())})
        sizes.commit([sizes.stage(update)])
    with client.begin_transaction("rows", operation="delete") as deletes:
        deletes.commit([deletes.stage(pa.table({"id": [2, 9]}))])
    changes = pa.table(
        {
            "__change_type": ["+I", "-D", "-U", "+U"],
            "id": [5, 3, 1, 1],
            "name": ["e", None, None, "A"],
            "size": pa.array([5, None, None, 11], pa.int32()),
        }
    )
    with client.begin_transaction("rows", operation="upsert") as stream:
        stream.commit([stream.stage(changes)])

    found = client.lookup("rows", pa.table({"id": [1, 2, 3, 4, 5]})).to_pylist()
    assert [(row["name"], row["size"]) for row in found if row["__found"]] == [
        ("A", 11),
        (None, 40),
        ("e", 5),
    ]
    assert client.count("rows") == 3


def test_what_is_wrong_is_refused_when_it_is_staged(client: StorageClient) -> None:
    _create(client, "events")
    _create(client, "rows")
    with pytest.raises(UnsupportedError, match="begin a transaction that upserts"):
        client.begin_transaction("rows", operation="append")
    with pytest.raises(UnsupportedError, match="begin a transaction that appends"):
        client.begin_transaction("events", operation="upsert")
    with pytest.raises(UnsupportedError, match="only an upsert names columns"):
        client.begin_transaction("events", columns=["id"])
    with pytest.raises(InvalidRequestError, match="an app_id and a version, or neither"):
        client.begin_transaction("events", app_id="app")

    upsert = client.begin_transaction("rows", operation="upsert")
    with pytest.raises(SchemaMismatchError, match="'id' must not be null, but row 0 is"):
        upsert.stage(pa.table({"id": pa.array([None], pa.int64()), "name": ["x"]}))
    with pytest.raises(SchemaMismatchError, match="'name' is missing"):
        upsert.stage(pa.table({"id": [1]}))
    with pytest.raises(InvalidRequestError, match="has no part 'nonsense'"):
        upsert.commit(["nonsense"])
    assert upsert.abort() is TransactionStatus.ABORTED
    assert upsert.abort() is TransactionStatus.ABORTED
    with pytest.raises(TransactionNotFoundError):
        upsert.commit([])


def _create_sums(client: StorageClient, **more: str) -> None:
    """Make a table whose sums overflow soon."""
    merge = {"table.merge-engine": "aggregation", "fields.n.agg": "sum"}
    schema = _sums([], []).schema
    client.create_table(
        "sums", schema, primary_key=("id",), bucket_count=2, properties=merge | more
    )


def _sums(ids: list[int], numbers: list[int]) -> pa.Table:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int8())])
    return pa.table({"id": ids, "n": numbers}, schema)


def test_a_commit_that_cannot_be_applied_changes_nothing(client: StorageClient) -> None:
    """An overflow shows only where rows meet those that are there."""
    _create_sums(client)
    client.upsert("sums", _sums([1, 2], [100, 1]))
    before = client.positions("sums")

    transaction = client.begin_transaction("sums", operation="upsert")
    parts = [transaction.stage(_sums([2, 3], [1, 1])) for _ in range(3)]
    parts.append(transaction.stage(_sums([1], [100])))
    with pytest.raises(InvalidRequestError, match="overflows"):
        transaction.commit(parts)

    assert client.positions("sums") == before
    with pytest.raises(TransactionNotFoundError):
        transaction.status()
    with client.begin_transaction("sums", operation="upsert") as after:
        after.commit([after.stage(_sums([2, 3], [1, 1]))])
    found = client.lookup("sums", pa.table({"id": [1, 2, 3]})).to_pydict()
    assert found["n"] == [100, 2, 1]


def test_an_overwrite_leaves_what_its_rows_make_of_an_empty_table(client: StorageClient) -> None:
    _create_sums(client, **{"table.delete.behavior": "allow"})
    client.upsert("sums", _sums([1, 2, 3], [100, 1, 1]))

    with client.begin_transaction("sums", operation="overwrite") as transaction:
        # 100 + 100 would overflow, but what is there does not count.
        first = transaction.stage(_sums([1, 4], [100, 1]))
        second = transaction.stage(_sums([1, 4], [1, 1]))
        result = transaction.commit([first, second])

    assert result.row_count == 4
    keys = pa.table({"id": [1, 2, 3, 4]})
    assert client.lookup("sums", keys).to_pydict()["n"] == [101, None, None, 2]
    assert client.count("sums") == 2
    with client.begin_transaction("sums", operation="overwrite") as transaction:
        part = transaction.stage(_sums([1, 1], [100, 100]))
        with pytest.raises(InvalidRequestError, match="overflows"):
            transaction.commit([part])
    assert client.count("sums") == 2
    with client.begin_transaction("sums", operation="overwrite") as transaction:
        transaction.commit([])
    assert client.count("sums") == 0


def test_what_cannot_be_overwritten_is_refused_at_once(client: StorageClient) -> None:
    client.create_table(
        "firsts", SCHEMA, primary_key=("id",), properties={"table.merge-engine": "first_row"}
    )
    with pytest.raises(UnsupportedError, match=r"table.delete.behavior = ignore"):
        client.begin_transaction("firsts", operation="overwrite")


def test_the_latest_are_listed_newest_first(client: StorageClient) -> None:
    _create(client, "rows")
    assert client.transactions("rows") == []
    with client.begin_transaction("rows", operation="upsert", app_id="job", version=3) as written:
        committed = written.commit([written.stage(_rows(0, 10))])
    staged = client.begin_transaction("rows", operation="delete")

    found = client.transactions("rows")

    assert [one["transaction_id"] for one in found] == [
        staged.transaction_id,
        written.transaction_id,
    ]
    assert found[1] == {
        "transaction_id": written.transaction_id,
        "operation": "upsert",
        "app_id": "job",
        "version": 3,
        "begun_timestamp_us": found[1]["begun_timestamp_us"],
        "status": "committed",
        "row_count": 10,
        "timestamp_us": committed.timestamp_us,
        "reason": "",
    }
    assert client.transactions("rows", limit=1) == found[:1]
    with pytest.raises(InvalidRequestError, match="limit = '0' must be a whole number from 1 on"):
        client.transactions("rows", limit=0)
