"""Changes of a source table, cut and packed anywhere, leave what the source has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.cdc_source._change_rows import ChangeBuffer, Key, RowShape
from streamhouse.cdc_source._source_types import WireType
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.records.unavailable_value import UnavailableValue

SCHEMA: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("n", pa.int64()), ("wide", pa.string())]
)
SHAPE: Final = RowShape("db.t", SCHEMA, ("id",), {"wide": WireType("STRING")})
PLACEHOLDER: Final = "__unchanged_0123"

Rows = dict[int, dict[str, Any]]


class Ours:
    """The table that the changes come to, as an obvious dict."""

    def __init__(self, folder: Path, *, chunk_rows: int) -> None:
        self.rows: Rows = {}
        self.buffer = ChangeBuffer(
            unchanged=UnavailableValue(PLACEHOLDER),
            lookup=self.lookup,
            folder=folder,
            chunk_rows=chunk_rows,
            memory_bytes_max=2_000,
        )

    def lookup(self, keys: list[Key]) -> pa.Table:
        found = [self.rows.get(int(key[0])) for key in keys]
        return pa.Table.from_pylist([row or {} for row in found], schema=_nullable(SCHEMA))

    def event(self, op: str, row: dict[str, Any]) -> None:
        self.buffer.add(op, row, json.dumps({"after": row}, separators=(",", ":")), SHAPE)

    def commit(self) -> None:
        if self.buffer.is_replaced:
            self.rows.clear()
        for table in self.buffer.complete_tables(SHAPE):
            for row in table.to_pylist():
                if row.pop("__change_type") == "d":
                    self.rows.pop(row["id"], None)
                else:
                    self.rows[row["id"]] = row
        self.buffer.discard_complete()


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


ids = st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("put"), ids, st.integers(0, 9), st.sampled_from(["short", "w" * 1_200])),
    st.tuples(st.just("touch"), ids, st.integers(0, 9)),
    st.tuples(st.just("move"), ids, ids),
    st.tuples(st.just("delete"), ids),
    st.tuples(st.just("truncate")),
    st.tuples(st.just("end")),
    st.tuples(st.just("commit")),
)


@given(st.lists(steps, max_size=40), st.integers(1, 4))
def test_any_changes_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, given_steps: list[tuple[Any, ...]], chunk: int
) -> None:
    source: Rows = {}
    ours = Ours(tmp_path_factory.mktemp("rows"), chunk_rows=chunk)
    committed: Rows = {}
    for kind, *arguments in [*given_steps, ("end",), ("commit",)]:
        if kind == "end":
            ours.buffer.end_transaction(SHAPE)
            committed = {key: dict(row) for key, row in source.items()}
        elif kind == "commit":
            ours.commit()
            assert ours.rows == committed
        else:
            _change(source, ours, kind, arguments)


def _change(source: Rows, ours: Ours, kind: str, arguments: list[Any]) -> None:
    """Change the source, and tell it as Debezium does."""
    if kind == "truncate":
        source.clear()
        ours.buffer.truncate()
        return
    key = arguments[0]
    if kind == "put":
        op = "u" if key in source else "c"
        source[key] = {"id": key, "n": arguments[1], "wide": arguments[2]}
        ours.event(op, dict(source[key]))
    elif key not in source:
        return
    elif kind == "delete":
        del source[key]
        ours.event("d", {"id": key, "n": None, "wide": None})
    elif kind == "touch":
        source[key]["n"] = arguments[1]
        ours.event("u", _as_sent(source[key]))
    elif arguments[1] not in source:
        row = source.pop(key)
        ours.event("d", {"id": key, "n": None, "wide": None})
        source[arguments[1]] = {**row, "id": arguments[1]}
        ours.event("c", _as_sent(source[arguments[1]]))


def _as_sent(row: dict[str, Any]) -> dict[str, Any]:
    """PostgreSQL leaves a wide value out that did not change; a short one it sends again."""
    return {**row, "wide": PLACEHOLDER} if len(row["wide"]) > 1_000 else dict(row)


@pytest.mark.parametrize(
    "sent",
    [
        PLACEHOLDER,
        [PLACEHOLDER],
        list(PLACEHOLDER.encode()),
        {PLACEHOLDER: PLACEHOLDER},
    ],
)
def test_a_value_left_out_is_found_in_each_form(sent: Any) -> None:
    value = json.dumps(sent, separators=(",", ":")) if isinstance(sent, dict) else sent
    row = {"id": 1, "a": value, "b": "x"}
    text = json.dumps({"after": row}, separators=(",", ":"))

    assert UnavailableValue(PLACEHOLDER).columns_of(row, text) == ("a",)
    assert UnavailableValue("__unchanged_other").columns_of(row, text) == ()


def test_a_chunk_of_an_earlier_schema_gets_the_columns_of_the_later_one() -> None:
    later = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("new", pa.string())])
    shape = RowShape("db.t", later, ("id",), {})

    found = shape.conform(
        pa.table({"id": pa.array([1], pa.int64()), "n": pa.array([2], pa.int32())})
    )

    assert found.to_pylist() == [{"id": 1, "n": 2, "new": None}]
    assert found.schema == later


@pytest.mark.parametrize("op", ["c", "u", "d", "r"])
def test_a_change_without_a_column_of_the_key_is_refused(tmp_path: Path, op: str) -> None:
    ours = Ours(tmp_path, chunk_rows=10)
    with pytest.raises(SchemaMismatchError, match=r"'db\.t'.* without column 'id' of the primary"):
        ours.event(op, {"id": None, "n": 1, "wide": "x"})
