"""A write is one transaction: the attempts Spark reports, in order, once or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from streamhouse.connector.write._write_jobs import StagedRows, StreamJob, TransactionJob
from streamhouse.connector.write._write_options import write_options
from streamhouse.connector.write._write_target import WriteTarget, resolve_target
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.schema_change import change_schema
from tests.support.described_tables import DescribedTables
from tests.support.held_step import around

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
HOUR_MS = 3_600_000


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> DescribedTables:
    tables = DescribedTables()
    tables.create_table("db.log", SCHEMA)
    tables.create_table("db.keyed", SCHEMA, primary_key=["id"])
    around(monkeypatch, "client-opening", lambda *_: tables)
    return tables


def target(tables: DescribedTables, path: str = "db.log", **options: str) -> WriteTarget:
    given = write_options({"path": path, **options})
    return resolve_target(tables, given, SCHEMA, is_stream=False)


def batches(*values: range) -> Iterator[pa.RecordBatch]:
    for part in values:
        yield pa.record_batch({"id": pa.array(part, pa.int64()), "v": pa.array(part, pa.int64())})


def begun(tables: DescribedTables, goal: WriteTarget, **named: Any) -> TransactionJob:
    given = {"app_id": None, "version": None, **named}
    job = TransactionJob.begun(tables, goal, timeout_ms=HOUR_MS, **given)
    copied: TransactionJob = pickle.loads(pickle.dumps(job))
    return copied


def ids(tables: DescribedTables, path: str = "db.log") -> list[list[int]]:
    return [[row["id"] for row in commit] for commit in tables.committed.get(path, [])]


def test_only_reported_attempts_are_committed_in_the_tasks_order(tables: DescribedTables) -> None:
    job = begun(tables, target(tables))
    second = job.run(batches(range(10, 20), range(20, 30)))
    job.run(batches(range(5)))  # an attempt that failed later, or a slower twin
    first = job.run(batches(range(10)))
    empty = job.run(batches())
    assert ids(tables) == []

    job.commit([first, empty, second])
    job.commit([first, empty, second])
    job.abort([first, empty, second])

    assert ids(tables) == [list(range(30))]
    assert first.row_count + second.row_count == 30


def test_an_aborted_job_leaves_nothing_and_takes_nothing_more(tables: DescribedTables) -> None:
    job = begun(tables, target(tables))
    staged = job.run(batches(range(10)))

    job.abort([staged, None])

    with pytest.raises(Exception, match="is aborted"):
        job.run(batches(range(5)))
    assert ids(tables) == []


def test_a_version_is_written_once(tables: DescribedTables) -> None:
    named = {"app_id": "nightly", "version": 7}
    job = begun(tables, target(tables), **named)
    job.commit([job.run(batches(range(3)))])

    again = begun(tables, target(tables), **named)
    rows = batches(range(3))
    again.commit([again.run(rows)])
    again.abort([])

    assert ids(tables) == [[0, 1, 2]]
    assert next(rows, None) is None, "Spark throws away a worker that leaves its input unread"


@pytest.mark.parametrize(
    ("mode", "operation", "columns"),
    [("", "upsert", None), ("delete", "delete", None), ("partial", "upsert", ("id", "v"))],
)
def test_what_the_transaction_does(
    tables: DescribedTables, mode: str, operation: str, columns: tuple[str, ...] | None
) -> None:
    given = write_options({"path": "db.keyed"} | ({"write.mode": mode} if mode else {}))
    frame = pa.schema([SCHEMA.field("id")]) if mode == "delete" else SCHEMA

    begun(tables, resolve_target(tables, given, frame, is_stream=False))

    assert tables.transactions[0].begun == {
        "operation": operation, "columns": columns, "app_id": None, "version": None,
        "timeout_s": 3_600.0, "join": False, "schema_id": 0,
        "source": None, "run": None,
    }  # fmt: skip


def test_a_table_created_again_gets_no_rows(tables: DescribedTables) -> None:
    job = begun(tables, target(tables))
    tables.create_table("db.log", SCHEMA)

    with pytest.raises(TableNotFoundError, match="dropped and created again"):
        job.run(batches(range(3)))


def test_tasks_apply_in_the_order_of_the_sequence(tables: DescribedTables) -> None:
    goal = target(tables, "db.keyed", **{"sequence.column": "v"})
    job = begun(tables, goal)
    late, early = job.run(batches(range(5, 9))), job.run(batches(range(3), range(3, 6)))

    job.commit([late, early])

    assert ids(tables, "db.keyed") == [[0, 1, 2, 3, 4, 5, 5, 6, 7, 8]]
    other = begun(tables, goal)
    with pytest.raises(InvalidRequestError, match="orderBy"):
        other.run(batches(range(3), range(2)))
    with pytest.raises(InvalidRequestError, match="orderBy"):
        other.commit([other.run(batches(range(9))), other.run(batches(range(5, 7)))])


class Query:
    """What Spark tells the tasks of a query's micro-batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batch_id: int | None = 0
        context = SimpleNamespace(getLocalProperty=self._property)
        monkeypatch.setattr(TaskContext, "get", lambda: context)

    def _property(self, key: str) -> str | None:
        values = {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": self.batch_id}
        return None if values[key] is None else str(values[key])


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Query:
    return Query(monkeypatch)


def stream(tables: DescribedTables, app_id: str | None = None) -> StreamJob:
    return StreamJob(target=target(tables), app_id=app_id, timeout_ms=HOUR_MS)


def test_a_micro_batch_is_one_transaction_of_all_its_tasks(
    tables: DescribedTables, query: Query
) -> None:
    job = stream(tables)
    messages = [job.run(batches(range(5))), job.run(batches()), job.run(batches(range(5, 9)))]

    stream(tables).commit(messages)

    assert ids(tables) == [list(range(9))]
    assert [(t.begun["app_id"], t.begun["version"]) for t in tables.transactions] == [
        ("query-1", 0)
    ]


def test_a_replayed_micro_batch_writes_nothing_and_the_next_one_does(
    tables: DescribedTables, query: Query
) -> None:
    for batch_id in (0, 1, 1, 0, 2):
        query.batch_id = batch_id
        messages = [stream(tables, "mine").run(batches(range(batch_id * 2, batch_id * 2 + 2)))]
        stream(tables, "mine").commit(messages)

    assert ids(tables) == [[0, 1], [2, 3], [4, 5]]


def test_a_micro_batch_whose_commit_failed_is_written_by_its_replay(
    tables: DescribedTables, query: Query
) -> None:
    messages: list[StagedRows | None] = [stream(tables).run(batches(range(5))), None]
    stream(tables).abort(messages)

    stream(tables).commit([stream(tables).run(batches(range(7)))])
    # What was committed is no longer taken back.
    stream(tables).abort(messages)

    assert ids(tables) == [list(range(7))]


def test_a_micro_batch_without_rows_or_messages_is_nothing(
    tables: DescribedTables, query: Query
) -> None:
    stream(tables).commit([])
    stream(tables).commit([stream(tables).run(batches())])

    assert tables.transactions == []


def test_tasks_of_two_transactions_are_not_half_committed(
    tables: DescribedTables, query: Query
) -> None:
    first = stream(tables).run(batches(range(5)))
    tables.transactions[0].abort()  # it timed out
    second = stream(tables).run(batches(range(5, 9)))

    with pytest.raises(UnavailableError, match="restart the query"):
        stream(tables).commit([first, second])

    assert ids(tables) == []


def test_an_overwrite_is_a_transaction_that_says_so(tables: DescribedTables) -> None:
    given = write_options({"path": "db.keyed"})
    goal = resolve_target(tables, given, SCHEMA, is_stream=False, is_overwrite=True)

    job = begun(tables, goal)
    job.commit([])

    assert [t.begun["operation"] for t in tables.transactions] == ["overwrite"]
    assert ids(tables, "db.keyed") == [[]]


def test_a_write_that_comes_again_says_what_it_means_by_a_name_of_two_columns(
    tables: DescribedTables,
) -> None:
    changes = [{"drop": "v", "confirm": "v"}, {"add": "v", "type": "bigint"}]
    tables.infos["db.log"] = change_schema(tables.infos["db.log"], changes)
    numbered = {"app.id": "nightly", "app.version": "7"}

    assert target(tables).schema_id == 1
    with pytest.raises(SchemaMismatchError, match=r"another column .* option 'schema.id' = '1'"):
        target(tables, **numbered)
    assert target(tables, **numbered, **{"schema.id": "1"}).schema_id == 1
    assert target(tables, **{"schema.id": "0"}).schema_id == 0
    with pytest.raises(InvalidRequestError, match="remove one of the two"):
        write_options({"path": "db.log", "schema.id": "0", "mergeSchema": "true"})
