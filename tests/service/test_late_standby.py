"""Reads at a standby that is some seconds behind, and answers: nobody decides by what it lacks.

With `--journal-ack disk` and a long `--journal-linger-ms` the owner shows rows that are in no
object of the journal yet.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.connector.lookup._joined_batches import joined, looked_up_by
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.core.model.offsets import buckets_to_json
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.options.connection import client_for
from tests.support.journal_machines import JournalHome, Pair
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64())])
_TABLES = ("counted", "scanned", "skipped", "altered", "joined")
ARGUMENTS = (
    *("--journal-ack", "disk", "--journal-lag-max-ms", "16000", "--journal-linger-ms", "4000"),
    *("--lease-ms", "3000"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return an owner and a standby, `machines[0]` and `machines[1]`."""
    folder = tmp_path_factory.mktemp("late") / "home"
    with JournalHome("file", folder=folder) as home, Pair(home, *ARGUMENTS) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(60)
        standby.start("--standby")
        yield pair


@pytest.fixture
def writer(pair: Pair) -> Iterator[StorageClient]:
    """Return another client than the one that reads."""
    with StorageClient(pair.machines[0].endpoint) as client:
        yield client


@pytest.fixture
def reader(pair: Pair) -> Iterator[StreamhouseClient]:
    """Return the client that reads."""
    with StreamhouseClient(pair.endpoint, read_from="any") as client:
        yield client


def _ask_first(client: StorageClient | StreamhouseClient, pair: Pair, of: int = 1) -> None:
    """Let the client ask one process before the other: the standby, or `of` 0 the owner."""
    any_process = StorageClient.of(client).transport.any_process
    machine = pair.machines[of]
    any_process.leave_alone(pair.other(machine).endpoint, waited_s=1_000)
    for table in _TABLES:
        any_process.answered(machine.endpoint, f"default.{table}")


def _create(pair: Pair, writer: StorageClient, name: str) -> TableInfo:
    """Make a table with the row 1, which the standby has, and the row's newer version, not yet."""
    info = writer.create_table(name, SCHEMA, primary_key=["id"])
    writer.upsert(name, [{"id": 1, "value": 1}])
    ends = {bucket: at.high_watermark for bucket, at in writer.positions(name).items()}
    least = urlencode({"table_id": info.table_id, "at_least": json.dumps(buckets_to_json(ends))})
    url = f"{pair.machines[1].endpoint}/v1/tables/{name}/rows/1?{least}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    wait_until(answers, "the standby's first row")
    writer.upsert(name, [{"id": 1, "value": 2}])
    return info


def _value(row: dict[str, Any] | None) -> Any:
    return None if row is None else row["value"]


def test_a_commit_by_positions_does_not_undo_what_the_standby_lacks(
    pair: Pair, writer: StorageClient, reader: StreamhouseClient
) -> None:
    _create(pair, writer, "counted")
    _ask_first(reader, pair)
    assert _value(reader.lookup_one("counted", id=1)) == 1, "it may be late"

    read = {bucket: at.high_watermark for bucket, at in reader.positions("counted").items()}
    value = _value(reader.lookup_one("counted", id=1))
    with reader.begin_transaction("counted", operation="upsert") as transaction:
        rows = pa.table({"id": [1], "value": [value + 10]}, schema=SCHEMA)
        transaction.commit([transaction.stage(rows)], read_offsets=read)

    assert _value(writer.lookup_one("counted", id=1)) == 12


def test_a_read_of_the_table_is_not_newer_than_later_lookups(
    pair: Pair, writer: StorageClient, reader: StreamhouseClient
) -> None:
    _create(pair, writer, "scanned")
    _ask_first(reader, pair)
    assert _value(reader.lookup_one("scanned", id=1)) == 1, "it may be late"
    assert reader.read("scanned").to_pylist() == [{"id": 1, "value": 2}]
    _ask_first(reader, pair)
    assert _value(reader.lookup_one("scanned", id=1)) == 2


def test_a_client_finds_the_rows_of_a_transaction_that_is_skipped(
    pair: Pair, writer: StorageClient, reader: StreamhouseClient
) -> None:
    _create(pair, writer, "skipped")
    rows = pa.table({"id": [1], "value": [3]}, schema=SCHEMA)
    begin: dict[str, Any] = {"operation": "upsert", "app_id": "job", "version": 1}
    late = reader.begin_transaction("skipped", **begin)
    with writer.begin_transaction("skipped", **begin) as transaction:
        transaction.commit([transaction.stage(rows)])
    assert late.commit([late.stage(rows)]).is_skipped
    _ask_first(reader, pair)
    assert _value(reader.lookup_one("skipped", id=1)) == 3

    again = pa.table({"id": [1], "value": [4]}, schema=SCHEMA)
    begin["version"] = 2
    with writer.begin_transaction("skipped", **begin) as transaction:
        transaction.commit([transaction.stage(again)])
    assert reader.begin_transaction("skipped", **begin).is_skipped
    _ask_first(reader, pair)
    assert _value(reader.lookup_one("skipped", id=1)) == 4


def test_the_columns_of_lookups_do_not_go_back(
    pair: Pair, writer: StorageClient, reader: StreamhouseClient
) -> None:
    _create(pair, writer, "altered")
    keys = pa.table({"id": [1]})
    _ask_first(reader, pair)
    reader.lookup("altered", keys)
    writer.alter_schema("altered", [{"add": "more", "type": "bigint"}])
    _ask_first(reader, pair, of=0)
    assert "more" in reader.lookup("altered", keys).column_names
    _ask_first(reader, pair)
    assert "more" in reader.lookup("altered", keys).column_names


def test_a_task_of_spark_looks_up_every_write_from_before_the_task(
    pair: Pair, writer: StorageClient
) -> None:
    info = _create(pair, writer, "joined")
    endpoint = f"{pair.endpoint}#read_from=any"
    plan = LookupPlan(
        table="default.joined",
        endpoint=endpoint,
        token=None,
        frame_columns=("id",),
        key_schema=info.schema.select(["id"], table="joined").to_arrow(),
        is_whole_key=True,
        columns=("value",),
        row_schema=pa.schema([info.schema.to_arrow().field("value")]),
        cache_bytes=1 << 20,
    )

    def task() -> list[Any]:
        _ask_first(client_for(endpoint, None), pair)
        batches = [pa.RecordBatch.from_pydict({"id": [1]})]
        return [
            row["value"] for b in joined(batches, plan, looked_up_by(plan)) for row in b.to_pylist()
        ]

    assert task() == [2]
    writer.upsert("joined", [{"id": 1, "value": 3}])
    assert task() == [3]
