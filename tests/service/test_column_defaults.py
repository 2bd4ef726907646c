"""Columns added with a default: rows from before have it, wherever they are kept and however read.

A seeded life of a table, beside a model of dicts: columns come with and without defaults, are
renamed and widened; programs write whole frames, frames of an earlier version, and dicts; rows are
tiered and packed. After each step every reader sees the rows of the model.
"""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidSchemaError
from streamhouse.tiering.worker.maintain_job import maintain_table
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

_DEFAULTS: Final[dict[str, list[Any]]] = {
    "int": [7, -1],
    "bigint": [2**60],
    "double": [0.5],
    "decimal(9,2)": [Decimal("1.50")],
    "string": ["none", "it's", ""],
    "boolean": [True, False],
    "date": [datetime.date(2026, 1, 2)],
    "timestamp": [datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)],
    "timestamp_ntz": [datetime.datetime(2026, 1, 2, 3)],
    "binary": [b"\x00\xff"],
}
_WIDER: Final = {"int": "bigint", "decimal(9,2)": "decimal(12,2)"}


class _Life:
    def __init__(self, client: StreamhouseClient, *, is_keyed: bool, seed: int) -> None:
        self.client, self.path = client, f"life.t{int(is_keyed)}_{seed}"
        self.random = random.Random(seed)
        self.is_keyed = is_keyed
        self.rows: dict[int, dict[str, Any]] = {}
        self.types: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        self.versions: list[tuple[int, list[str]]] = []
        table = client.create_table(
            self.path,
            "id BIGINT NOT NULL, v STRING",
            primary_key="id" if is_keyed else (),
            bucket_count=2,
        )
        self.versions.append((table.schema_id, ["v"]))

    def step(self) -> None:
        getattr(self, self.random.choice(["add", "add", "rename", "widen", "tier", "maintain"]))()
        for write in self.random.sample(["frame", "earlier", "dicts"], 2):
            getattr(self, f"write_{write}")()

    def add(self) -> None:
        name = f"c{len(self.types)}"
        self.types[name] = self.random.choice(sorted(_DEFAULTS))
        default = self.random.choice([None, *_DEFAULTS[self.types[name]]])
        self.defaults[name] = default
        table = self.client.add_column(self.path, name, self.types[name], default=default)
        for row in self.rows.values():
            row[name] = default
        self.versions.append((table.schema_id, ["v", *self.types]))

    def rename(self) -> None:
        if self.types:
            old = self.random.choice(sorted(self.types))
            new = f"{old}x"
            self.client.rename_column(self.path, old, new)
            for place in (self.types, self.defaults):
                place[new] = place.pop(old)
            for row in self.rows.values():
                row[new] = row.pop(old)
            # Frames of versions before have the column by another name.
            self.versions = [(self.client.describe_table(self.path).schema_id, ["v", *self.types])]

    def widen(self) -> None:
        for name, data_type in self.types.items():
            if data_type in _WIDER:
                self.types[name] = _WIDER[data_type]
                self.client.widen_column(self.path, name, self.types[name])
                return

    def tier(self) -> None:
        tier_once(self.client, self.path)

    def maintain(self) -> None:
        self.tier()
        storage = StorageClient.of(self.client)
        list(maintain_table(storage, self.client.lake_catalog(), ThreadRunner(1), self.path))

    def _ids(self) -> list[int]:
        return [self.random.randrange(12) if self.is_keyed else len(self.rows) for _ in range(1)]

    def _write(self, rows: Any, **options: Any) -> None:
        write = self.client.upsert if self.is_keyed else self.client.append
        write(self.path, rows, **options)

    def write_frame(self) -> None:
        for number in self._ids():
            row = {"id": number, "v": "frame", **dict.fromkeys(self.types)}
            schema = self.client.describe_table(self.path).schema.to_arrow()
            self._write(pa.Table.from_pylist([row], schema=schema))
            self.rows[number] = row

    def write_earlier(self) -> None:
        schema_id, names = self.random.choice(self.versions)
        for number in self._ids():
            frame = pa.table({"id": [number], **{n: pa.nulls(1) for n in names if n != "v"}})
            frame = frame.append_column("v", pa.array(["earlier"]))
            self._write(frame, schema_id=schema_id)
            row = {"id": number, "v": "earlier", **dict.fromkeys(self.types)}
            row |= {n: d for n, d in self.defaults.items() if n not in names}
            self.rows[number] = row

    def write_dicts(self) -> None:
        for number in self._ids():
            self._write([{"id": number, "v": "dict"}])
            self.rows[number] = {"id": number, "v": "dict", **self.defaults}

    def check(self) -> None:
        model = [self.rows[number] for number in sorted(self.rows)]
        assert _sorted(self.client.read(self.path)) == model
        for name, default in self.defaults.items():
            if isinstance(default, str | int | float | Decimal):
                wanted = [row["id"] for row in model if row[name] == default]
                literal = (
                    "'" + default.replace("'", "''") + "'" if isinstance(default, str) else default
                )
                where = f"{name} = {literal}"
                assert self.client.count(self.path, where=where) == len(wanted), name
                narrow = self.client.read(self.path, columns=["id"], where=where)
                assert sorted(narrow.column("id").to_pylist()) == wanted
            nulls = sum(row[name] is None for row in model)
            assert self.client.count(self.path, where=f"{name} IS NULL") == nulls
        if self.is_keyed:
            answer = self.client.lookup(self.path, [{"id": row["id"]} for row in model])
            assert answer.drop(["__found"]).to_pylist() == [
                {name: row[name] for name in answer.column_names if name != "__found"}
                for row in model
            ]


def _sorted(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.sort_by("id").to_pylist()
    return rows


@pytest.mark.parametrize("is_keyed", [False, True])
def test_every_reader_sees_the_default_in_rows_from_before(tmp_path: Path, is_keyed: bool) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_database("life")
        for seed in range(2):
            life = _Life(client, is_keyed=is_keyed, seed=seed)
            for _ in range(10):
                life.step()
                life.check()
            life.tier()
            path = life.path
            from_lake = client.query(f"SELECT * FROM {path} ORDER BY id").to_pylist()
            assert from_lake == _sorted(client.read(path))
            # Packed files have the defaults as values, for every engine.
            life.maintain()
            life.check()
        if is_keyed:
            changes = client.read(f"{path}$changelog").to_pylist()
            assert {row["id"] for row in changes} == set(life.rows)
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        life.client = client
        life.check()


@pytest.mark.parametrize(
    ("data_type", "default", "message"),
    [
        ("int", "x", "column 'q': the default 'x' is no int"),
        ("int", 2**40, "the default '1099511627776' is no int"),
        ("double", float("nan"), "the default 'NaN' is no double"),
        ("array<int>", [1], r"a column of type array<int> cannot have a default"),
        ("string", "x" * 1001, "the default has 1001 characters; at most 1000"),
    ],
)
def test_a_default_that_does_not_fit_is_refused(
    client: StreamhouseClient, data_type: str, default: Any, message: str
) -> None:
    path = f"defaults.refused_{data_type[:3]}{abs(hash(message))}"
    if "defaults" not in client.list_databases():
        client.create_database("defaults")
    client.create_table(path, "id BIGINT")

    with pytest.raises(InvalidSchemaError, match=message):
        client.add_column(path, "q", data_type, default=default)
    assert client.describe_table(path).schema.names == ["id"]
