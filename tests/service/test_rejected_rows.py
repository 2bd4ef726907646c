"""Rows that do not fit go to `t$rejected`, together with the others that are written, and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import AppendWriter, Producer
from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    SchemaMismatchError,
    UnsupportedError,
)
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("day", pa.date32()),
    ]
)


@pytest.fixture
def rows_client(service: ServiceProcess) -> Iterator[StreamhouseClient]:
    with StreamhouseClient(service.endpoint) as client:
        for path in client.list_tables():
            # Its rejected rows go with it.
            if not path.endswith("__rejected"):
                client.drop_table(path)
        yield client


def _create(client: StreamhouseClient, path: str) -> None:
    client.create_table(path, SCHEMA, bucket_count=3, primary_key=("id",) if path == "keys" else ())


def _texts(*rows: tuple[Any, Any, Any]) -> pa.Table:
    ids, sizes, days = zip(*rows, strict=True)
    return pa.table({"id": pa.array(ids, pa.int64()), "size": list(sizes), "day": list(days)})


MIXED = _texts(
    (1, "10", "2026-01-01"),
    (2, "ten", "2026-01-02"),
    (None, "30", "2026-01-03"),
    (4, "40", "soon"),
    (5, "3000000000", None),
    (6, None, None),
)


def _ids(client: StreamhouseClient, path: str) -> list[int]:
    return sorted(client.read(path)["id"].to_pylist())


def _write(client: StreamhouseClient, path: str, rows: pa.Table, **options: Any) -> None:
    write = client.upsert if path == "keys" else client.append
    write(path, rows, **options)


@pytest.mark.parametrize("path", ["events", "keys"])
def test_what_does_not_fit_is_kept_with_its_reason(
    rows_client: StreamhouseClient, path: str
) -> None:
    _create(rows_client, path)

    _write(rows_client, path, MIXED, on_error="reject")

    assert _ids(rows_client, path) == [1, 6]
    kept = rows_client.read(f"{path}$rejected").sort_by("source_row").to_pylist()
    assert [(row["source_row"], row["column"]) for row in kept] == [
        (1, "size"),
        (2, "id"),
        (3, "day"),
        (4, "size"),
    ]
    assert "'ten' is no int" in kept[0]["reason"]
    assert "must not be null" in kept[1]["reason"]
    assert json.loads(kept[0]["row"]) == {"id": 2, "size": "ten", "day": "2026-01-02"}


@pytest.mark.parametrize("path", ["events", "keys"])
def test_without_the_option_such_rows_are_refused_and_no_table_is_made(
    rows_client: StreamhouseClient, path: str
) -> None:
    _create(rows_client, path)

    with pytest.raises(SchemaMismatchError):
        _write(rows_client, path, MIXED)

    assert rows_client.list_tables() == [f"default.{path}"]


@pytest.mark.parametrize("path", ["events", "keys"])
def test_a_replay_moves_what_fits_and_leaves_the_rest(
    rows_client: StreamhouseClient, path: str
) -> None:
    _create(rows_client, path)
    _write(rows_client, path, MIXED, on_error="reject")

    def fix(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["size"] == "ten":
            return row | {"size": 10}
        return row | {"day": "2026-02-01"} if row["day"] == "soon" else row

    result = rows_client.replay_rejected(path, fix=fix)

    assert (result.moved, result.left) == (2, 2)
    assert _ids(rows_client, path) == [1, 2, 4, 6]
    assert rows_client.read(f"{path}$rejected").num_rows == 2
    again = rows_client.replay_rejected(path)
    assert (again.moved, again.left) == (0, 2)


def test_replays_at_the_same_time_move_each_row_once(rows_client: StreamhouseClient) -> None:
    _create(rows_client, "events")
    rows = _texts(*((n, "x", None) for n in range(40)))
    for start in range(0, 40, 8):
        rows_client.append("events", rows.slice(start, 8), on_error="reject")

    def replay(parity: int) -> None:
        rows_client.replay_rejected(
            "events", fix=lambda row: row | {"size": 1} if row["id"] % 3 != parity else None
        )

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(replay, range(3)))

    assert _ids(rows_client, "events") == list(range(40))
    assert rows_client.read("events$rejected").num_rows == 0


def test_a_writers_call_that_is_repeated_is_done_once(rows_client: StreamhouseClient) -> None:
    _create(rows_client, "events")
    for _ in range(2):
        writer = AppendWriter(7)
        rows_client.append("events", MIXED, writer=writer, on_error="reject")
    assert writer.transactions == 1

    assert _ids(rows_client, "events") == [1, 6]
    assert rows_client.read("events$rejected").num_rows == 4


def test_a_producer_delivers_both_kinds(rows_client: StreamhouseClient) -> None:
    _create(rows_client, "events")

    with Producer(rows_client, "events", on_error="reject") as producer:
        calls = [producer.send(MIXED) for _ in range(3)]
        for call in calls:
            assert sum(end - start for start, end in call.result().values()) == 2

    assert _ids(rows_client, "events") == [1, 1, 1, 6, 6, 6]
    assert rows_client.read("events$rejected").num_rows == 12


def test_changes_are_rejected_and_replayed_as_changes(rows_client: StreamhouseClient) -> None:
    _create(rows_client, "keys")
    changes = _texts((1, "1", None), (2, "2", None), (1, None, None), (3, "x", None))
    changes = changes.append_column("__change_type", pa.array(["+I", "+I", "-D", "?"]))

    rows_client.upsert("keys", changes, on_error="reject")

    assert _ids(rows_client, "keys") == [2]
    result = rows_client.replay_rejected(
        "keys", fix=lambda row: row | {"size": 3, "__change_type": "c"}
    )
    assert (result.moved, result.left) == (1, 0)
    assert _ids(rows_client, "keys") == [2, 3]


def test_a_row_without_a_version_is_rejected_alone(rows_client: StreamhouseClient) -> None:
    engine = {
        "table.merge-engine": "versioned",
        "table.merge-engine.versioned.ver-column": "size",
    }
    rows_client.create_table("keys", SCHEMA, primary_key=("id",), properties=engine)
    rows = [{"id": 1, "size": 10, "day": None}, {"id": 2, "size": None, "day": None}]
    with pytest.raises(SchemaMismatchError, match="version column 'size' must not be null"):
        rows_client.upsert("keys", rows)
    rows_client.upsert("keys", rows, on_error="reject")
    assert _ids(rows_client, "keys") == [1]
    (rejected,) = rows_client.read("keys$rejected").to_pylist()
    assert (rejected["column"], rejected["reason"]) == (
        "size",
        "null, and the version column 'size' must not be null",
    )


def test_what_cannot_be_is_said_in_one_sentence(rows_client: StreamhouseClient) -> None:
    _create(rows_client, "keys")
    with pytest.raises(UnsupportedError, match="partial update cannot reject"):
        rows_client.upsert("keys", MIXED, columns=["id", "size"], on_error="reject")
    with pytest.raises(InvalidRequestError, match="refuse, reject"):
        rows_client.upsert("keys", MIXED, on_error="skip")  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError, match="kept for the rejected rows"):
        rows_client.create_table("keys__rejected", SCHEMA)
    rows_client.upsert("keys", MIXED, on_error="reject")
    with pytest.raises(UnsupportedError, match="none of its own"):
        rows_client.keep_rejected("keys$rejected")


@pytest.mark.parametrize("path", ["events", "keys"])
def test_a_kill_at_any_moment_leaves_both_kinds_or_none(path: str, tmp_path: Path) -> None:
    """Each call writes one row of each kind; killed between any two answers, they stay pairs."""
    told: list[int] = []
    for life in range(3):
        with (
            ServiceProcess(tmp_path / "data") as service,
            StreamhouseClient(service.endpoint) as client,
            # Of the call that is under way when the service is killed.
            StreamhouseClient(service.endpoint, timeout_s=2) as last,
            ThreadPoolExecutor(1) as threads,
        ):
            if life == 0:
                _create(client, path)
            for number in itertools.count(life * 1_000):
                pair = _texts((number, "1", None), (number, "x", None))
                is_last = number % 1_000 == 4 + 3 * life
                by = last if is_last else client
                call = threads.submit(_write, by, path, pair, on_error="reject")
                if is_last:
                    service.kill()
                    call.exception()
                    break
                call.result()
                told.append(number)
        with (
            ServiceProcess(tmp_path / "data") as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            kept = client.read(f"{path}$rejected")["row"].to_pylist()
            assert _ids(client, path) == sorted(json.loads(row)["id"] for row in kept)
            assert set(told) <= set(_ids(client, path))
