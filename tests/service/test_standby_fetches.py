"""Fetches that a standby answers: the owner's rows, up to what is applied, through takeovers."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from streamhouse.client import AppendWriter, StorageClient
from streamhouse.core.errors import UnknownOutcomeError
from streamhouse.core.wire.arrow_body import decode_fetch_body
from tests.support.journal_machines import JournalHome, Machine, Pair
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64())])
ARGUMENTS = ("--lease-ms", "1500", "--journal-linger-ms", "2")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Return an owner and a standby, `machines[0]` and `machines[1]`."""
    with JournalHome("file", folder=tmp_path / "home") as home, Pair(home, *ARGUMENTS) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(60)
        standby.start("--standby")
        yield pair


class _Page(NamedTuple):
    status: int
    role: str | None
    rows: list[tuple[int, dict[str, Any]]]
    """Each row with its offset."""


def _fetch(machine: Machine, table: str, bucket: int, **query: Any) -> _Page:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    url = f"{machine.endpoint}/v1/tables/{table}/buckets/{bucket}/fetch?{text}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = decode_fetch_body(pa.py_buffer(answer.read()))
            role = answer.headers["x-role"]
    except urllib.error.HTTPError as error:
        return _Page(error.code, None, [])
    assert body is not None
    rows: list[tuple[int, dict[str, Any]]] = []
    for address, batch in body.batches:
        offsets = range(address.base_offset, address.base_offset + batch.num_rows)
        rows += zip(offsets, batch.to_pylist(), strict=True)
    return _Page(200, role, rows)


def _fetches(machine: Machine) -> int:
    """The fetches that a process has answered with rows."""
    return machine.answers("fetch")


def _all_rows(machine: Machine, client: StorageClient, table: str) -> dict[int, list[Any]]:
    """Return all rows of the log that a process has, from the owner's starts to its ends."""
    info, rows = client.describe_table(table), dict[int, list[Any]]()
    for bucket, at in client.positions(table).items():
        rows[bucket], position = [], int(at.log_start_offset)
        while position < at.high_watermark:
            page = _fetch(
                machine,
                table,
                bucket,
                offset=position,
                end_offset=at.high_watermark,
                max_bytes=9_000,
                table_id=info.table_id,
                schema_id=info.schema_id,
                read_from="any",
            )
            if page.status != 200:
                # The standby has not applied this yet.
                break
            assert page.rows, "no page is empty"
            assert page.role == ("standby" if machine.name == "two" else None)
            rows[bucket] += [row for row in page.rows if row[0] >= position]
            position = rows[bucket][-1][0] + 1
    return rows


def _compare(pair: Pair, client: StorageClient, table: str) -> None:
    owner, standby = pair.machines
    expected = _all_rows(owner, client, table)
    wait_until(
        lambda: (
            sum(map(len, _all_rows(standby, client, table).values()))
            == sum(map(len, expected.values()))
        ),
        "the standby's rows",
    )
    assert _all_rows(standby, client, table) == expected


def test_a_standby_answers_a_fetch_that_takes_its_rows_and_nothing_else(pair: Pair) -> None:
    owner, standby = pair.machines
    with StorageClient(owner.endpoint) as client:
        table_id = client.create_table("rows", SCHEMA).table_id
        client.append("rows", [{"id": n, "value": n} for n in range(5)])
        _compare(pair, client, "rows")

        known = {"table_id": table_id, "read_from": "any"}
        page = _fetch(standby, "rows", 0, offset=3, end_offset=5, **known)
        assert (page.status, page.role) == (200, "standby")
        assert page.rows == _fetch(owner, "rows", 0, offset=3, end_offset=5, **known).rows
        for query in (
            {"offset": 0, "table_id": table_id},
            {"offset": 0, "read_from": "any"},
            {"offset": 0, "table_id": table_id, "read_from": "owner"},
            {"offset": 5, **known},
            {"offset": 5, "max_wait_ms": 20, **known},
            {"offset": 6, **known},
            {"offset": 0, **known, "table_id": 99},
            {"offset": 0, **known, "schema_id": 99},
        ):
            assert _fetch(standby, "rows", 0, **query).status == 421, query
        assert _fetch(standby, "rows", 7, offset=0, **known).status == 421
        assert _fetch(owner, "rows", 0, offset=0, read_from="any").status == 400
        assert _fetch(owner, "rows", 0, offset=0, read_from="all", table_id=table_id).status == 400
        assert _fetch(owner, "rows", 0, offset=5, **known).rows == []


@pytest.mark.parametrize("seed", range(2))
def test_its_rows_are_those_of_the_owner_in_a_random_life(pair: Pair, seed: int) -> None:
    """Appends, transactions, overwrites, other schemas, drops, a log and a changelog."""
    random, owner = Random(seed), pair.machines[0]
    with StorageClient(owner.endpoint) as client:
        for _ in range(2):
            for table, key in (("rows", ()), ("keyed", ("id",))):
                client.create_table(
                    table,
                    SCHEMA,
                    bucket_count=2,
                    primary_key=key,
                    properties={"table.log.segment-bytes": "64kb"},
                )
            for number in range(14):
                table = random.choice(("rows", "keyed"))
                write = client.append if table == "rows" else client.upsert
                count = random.choice((1, 30, 4_000))
                rows = [{"id": random.randrange(5_000), "value": number} for _ in range(count)]
                match random.choice(("write", "write", "transaction", "overwrite", "schema")):
                    case "write":
                        write(table, rows)
                    case "transaction":
                        kind: Any = "append" if table == "rows" else "upsert"
                        with client.begin_transaction(table, operation=kind) as transaction:
                            transaction.commit([transaction.stage(pa.Table.from_pylist(rows))])
                    case "overwrite":
                        with client.begin_transaction(table, operation="overwrite") as transaction:
                            transaction.commit([transaction.stage(pa.Table.from_pylist(rows))])
                    case "schema":
                        client.alter_schema(table, [{"add": f"more{number}", "type": "bigint"}])
                if random.random() < 0.4:
                    _compare(pair, client, table)
            for table in ("rows", "keyed"):
                _compare(pair, client, table)
                client.drop_table(table)


def test_scans_and_subscriptions_of_clients_that_read_from_any_spare_the_owner(pair: Pair) -> None:
    owner, standby = pair.machines
    rows = [{"id": n, "value": n} for n in range(30_000)]
    with StorageClient(pair.endpoint, read_from="any") as client:
        table_id = client.create_table("rows", SCHEMA).table_id
        for start in range(0, len(rows), 3_000):
            client.append("rows", rows[start : start + 3_000])
        _compare(pair, client, "rows")
        before, page_bytes = (_fetches(owner), _fetches(standby)), 60_000

        def scan(client: StorageClient) -> list[int]:
            batches = client.read_range(
                "rows", 0, 0, len(rows), table_id=table_id, page_bytes=page_bytes
            )
            return [value for batch in batches for value in batch.data["id"].to_pylist()]

        for _ in range(3):
            assert scan(client) == list(range(len(rows)))
        by_owner, by_standby = _fetches(owner) - before[0], _fetches(standby) - before[1]
        assert by_standby >= 10
        assert abs(by_owner - by_standby) <= 3, "in turn"

        before_owner = _fetches(owner)
        twice = f"{standby.endpoint},{standby.endpoint.replace('127.0.0.1', 'localhost')}"
        with StorageClient(twice, read_from="any") as aside:
            assert scan(aside) == list(range(len(rows)))
            with aside.subscribe("rows", start="earliest") as subscription:
                received = list[int]()
                while len(received) < len(rows):
                    received += next(subscription).data["id"].to_pylist()
                assert received == list(range(len(rows)))
                assert _fetches(owner) == before_owner

                client.append("rows", [{"id": -1, "value": 0}])
                assert next(subscription).data["id"].to_pylist() == [-1], "the owner pushes it"
        assert _fetches(owner) == before_owner


def test_scans_return_every_acknowledged_row_through_takeovers(pair: Pair) -> None:
    """Owners are killed -9 while a writer appends and scans read what was acknowledged."""
    endpoint = f"{pair.endpoint}#failover_s=60"
    acknowledged, ended, failures = [0], threading.Event(), list[BaseException]()
    with StorageClient(endpoint) as client:
        table_id = client.create_table("rows", SCHEMA).table_id

    def write() -> None:
        writer = AppendWriter()
        try:
            with StorageClient(endpoint) as client:
                while not ended.is_set():
                    count = acknowledged[0]
                    rows = [{"id": n, "value": n} for n in range(count, count + 50)]
                    try:
                        client.append("rows", rows, writer=writer)
                    except UnknownOutcomeError:
                        # The writer numbers its batches: the rows are stored once.
                        continue
                    acknowledged[0] = count + 50
        except BaseException as error:  # noqa: BLE001 - the test says it
            failures.append(error)

    scans = [0]

    def read() -> None:
        try:
            with StorageClient(endpoint, read_from="any") as client:
                while not ended.is_set():
                    end = acknowledged[0]
                    batches = client.read_range(
                        "rows", 0, 0, end, table_id=table_id, page_bytes=20_000
                    )
                    values = [n for batch in batches for n in batch.data["id"].to_pylist()]
                    assert values == list(range(end))
                    scans[0] += 1
        except BaseException as error:  # noqa: BLE001 - the test says it
            failures.append(error)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            owner = pair.owner(60)
            standby = pair.other(owner)
            before = _fetches(standby)
            wait_until(
                lambda b=before, s=standby: failures or _fetches(s) > b + 10, "fetches at a standby"
            )
            owner.kill()
            standby.wait_until_owner(60)
            count = scans[0]
            wait_until(lambda c=count: failures or scans[0] > c + 2, "scans after the takeover")
            owner.start("--standby")
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)
    assert not failures, failures
