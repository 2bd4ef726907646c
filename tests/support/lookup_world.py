"""A table with a primary key as a dict, answering what a lookup asks of the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.core.errors import UnavailableError

__all__ = ["FakeTable", "plan_of"]

Row = dict[str, Any]


class FakeTable:
    """Rows under their keys; `asked` has every key that was asked for, in order."""

    def __init__(self, schema: pa.Schema, key: Sequence[str], rows: Sequence[Row]) -> None:
        self.schema = schema
        self.key = list(key)
        self.rows = {tuple(row[name] for name in key): row for row in rows}
        self.asked: list[tuple[Any, ...]] = []
        self.reads = 0
        self.is_unreadable = False
        self.changes = 0
        self.name: str | None = None

    def lookup(self, path: str, keys: pa.Table, *, columns: list[str]) -> pa.Table:
        asked = [tuple(row[name] for name in self.key) for row in keys.to_pylist()]
        self.asked += asked
        found = [self.rows.get(each) for each in asked]
        blank = dict.fromkeys(columns)
        rows = [blank if row is None else {name: row[name] for name in columns} for row in found]
        fields = [self.schema.field(name).with_nullable(True) for name in columns]
        answer = pa.Table.from_pylist(rows, schema=pa.schema(fields))
        return answer.append_column("__found", pa.array([row is not None for row in found]))

    def prefix_lookup(
        self, path: str, keys: pa.Table, *, limit: int, columns: list[str]
    ) -> pa.Table:
        names = keys.column_names
        rows: list[Row] = []
        for asked in keys.to_pylist():
            self.asked.append(tuple(asked.values()))
            under = [r for r in self.rows.values() if all(r[n] == asked[n] for n in names)]
            rows += under[:limit]
        return self._table(rows, columns)

    def count(self, path: str) -> int:
        return len(self.rows)

    def cut(self) -> FakeTable:
        return self

    @property
    def place(self) -> str | None:
        return self.name

    def since(self, place: Any) -> int | None:
        """No cut leads to another: there is no log."""
        return None

    def read_since(self, place: Any, columns: list[str]) -> pa.Table:
        raise AssertionError("no cut leads here")

    def read(self, columns: list[str]) -> pa.Table:
        if self.is_unreadable:
            raise UnavailableError("the lake is out of reach")
        self.reads += 1
        return self._table(list(self.rows.values()), columns)

    def _table(self, rows: Sequence[Row], columns: list[str]) -> pa.Table:
        schema = pa.schema([self.schema.field(name) for name in columns])
        chosen = [{name: row[name] for name in columns} for row in rows]
        return pa.Table.from_pylist(chosen, schema=schema)


def plan_of(
    fake: FakeTable,
    *,
    given: Sequence[str],
    columns: Sequence[str],
    **changes: Any,
) -> LookupPlan:
    """Return the plan of a lookup by the first `given` columns of the key."""
    key = fake.key[: len(given)]
    return LookupPlan(
        **{
            "table": "default.t",
            "endpoint": "http://127.0.0.1:1",
            "token": None,
            "frame_columns": tuple(given),
            "key_schema": pa.schema([fake.schema.field(name) for name in key]),
            "is_whole_key": key == fake.key,
            "columns": tuple(columns),
            "row_schema": pa.schema([fake.schema.field(name) for name in columns]),
            "cache_bytes": 1 << 27,
            **changes,
        }
    )
