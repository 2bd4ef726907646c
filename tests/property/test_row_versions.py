"""Stored rows of several versions of a schema are read, and compared, as rows of the newest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions, versions_of

PLACE = pa.struct(
    [
        ("city", pa.string()),
        ("spots", pa.list_(pa.field("element", pa.struct([("x", pa.int32())])))),
        ("sizes", pa.map_(pa.string(), pa.struct([("x", pa.int32())]))),
    ]
)
FIRST = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int16()),
        pa.field("text", pa.string()),
        pa.field("list", pa.list_(pa.field("element", pa.float32()))),
        pa.field("place", PLACE),
    ]
)
SIZE = {"type": "struct", "fields": [{"name": "a", "type": "int"}]}
CHANGES: list[dict[str, Any]] = [
    {"widen": "small", "to": "int"},
    {"add": "flag", "type": "boolean", "first": True},
    {"rename": "text", "to": "words"},
    {"drop": "list", "confirm": "list"},
    {"add": "list", "type": "string", "after": "id"},
    {"widen": "small", "to": "bigint"},
    {"add": ["place", "street"], "type": "string", "first": True},
    {"add": ["place", "spots", "element", "y"], "type": "int", "after": "x"},
    {"add": ["place", "sizes", "value", "y"], "type": SIZE, "first": True},
    {"rename": "place", "to": "address"},
    {"add": ["address", "sizes", "value", "y", "b"], "type": "int"},
]


def _versions() -> TableInfo:
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(FIRST), primary_key=("id",)
    )
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    for change in CHANGES:
        info = change_schema(info, [change])
    return info


INFO = _versions()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "string": st.text(max_size=20),
    "list<element: float>": st.lists(st.integers(-9, 9).map(float), max_size=3),
}


def _values(t: pa.DataType) -> st.SearchStrategy[Any]:
    """Any value of a type; of a struct all fields or none."""
    if pa.types.is_struct(t):
        return st.fixed_dictionaries({f.name: st.none() | _values(f.type) for f in t})
    if pa.types.is_map(t):
        items = st.none() | _values(t.item_type)
        return st.dictionaries(VALUES["string"], items, max_size=3).map(lambda d: list(d.items()))
    if pa.types.is_list(t) and pa.types.is_struct(t.value_type):
        return st.lists(st.none() | _values(t.value_type), max_size=3)
    return VALUES[str(t)]


def _as_version(value: Any, t: pa.DataType) -> Any:
    """What a value of an earlier version is as one of type `t`: fields it lacks are null."""
    if value is None or not pa.types.is_nested(t):
        return value
    if pa.types.is_struct(t):
        return {f.name: _as_version(value.get(f.name), f.type) for f in t}
    if pa.types.is_map(t):
        return [(key, _as_version(item, t.item_type)) for key, item in value]
    return [_as_version(item, t.value_type) for item in value]


def _codec(schema_id: int) -> RowCodec:
    return RowCodec(
        INFO.schema_version(schema_id),
        schema_id=schema_id,
        table="db.t",
        earlier={i: schema for i, schema in INFO.schema_versions.items() if i < schema_id},
    )


def _row(data: st.DataObject, schema_id: int) -> dict[int, Any]:
    """A row by column id."""
    return {
        column.id: data.draw(
            _values(column.type) if not column.nullable else st.none() | _values(column.type)
        )
        for column in INFO.schema_version(schema_id).columns
    }


@given(data=st.data())
def test_rows_of_any_versions_are_read_as_the_newest(data: st.DataObject) -> None:
    newest = data.draw(st.integers(0, len(CHANGES)))
    written = data.draw(st.lists(st.integers(0, newest), min_size=1, max_size=8))
    rows = [_row(data, schema_id) for schema_id in written]
    offsets = data.draw(
        st.lists(st.integers(0, 2**62), min_size=len(rows), max_size=len(rows)).map(np.array)
    )
    values = []
    for schema_id, row, offset in zip(written, rows, offsets, strict=True):
        codec = _codec(schema_id)
        own = {c.name: row[c.id] for c in codec.schema.columns}
        value = codec.encode(pa.RecordBatch.from_pylist([own], schema=codec.arrow_schema))
        stamp_versions(value, np.array([offset], dtype=np.int64))
        values.append(value)
    stored = pa.concat_arrays(values)
    codec = _codec(newest)
    expected = [
        {c.name: _as_version(row.get(c.id), c.type) for c in codec.schema.columns} for row in rows
    ]

    assert codec.decode(stored).to_pylist() == expected

    holes = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    sparse = pa.array(
        [None if hole else value for hole, value in zip(holes, stored.to_pylist(), strict=True)],
        pa.binary(),
    )
    current = codec.in_current_version(sparse)
    assert [value is None for value in current.to_pylist()] == holes
    present = current.drop_null()
    kept = [row for row, hole in zip(expected, holes, strict=True) if not hole]
    assert versions_of(present).tolist() == offsets[~np.array(holes)].tolist()
    # Compared as bytes from now on: equal to what the newest version writes.
    written_anew = codec.encode(pa.RecordBatch.from_pylist(kept, schema=codec.arrow_schema))
    stamp_versions(written_anew, versions_of(present))
    assert present.to_pylist() == written_anew.to_pylist()
