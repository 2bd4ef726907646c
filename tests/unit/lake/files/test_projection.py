"""Rows of a lake file as the table has them now, for rewrites."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnsupportedError
from streamhouse.lake.files.name_mapping import MappedField
from streamhouse.lake.files.projection import project


def with_id(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


NOW = pa.schema(
    [
        with_id("id", pa.int64(), 1),
        with_id("place", pa.struct([with_id("x", pa.int64(), 3), with_id("y", pa.int64(), 4)]), 2),
    ]
)
INSIDE = {"x": MappedField(4, "y", {}), "y": MappedField(3, "x", {})}


def test_fields_whose_names_were_swapped_are_found_by_id() -> None:
    kind = pa.struct([with_id("x", pa.int64(), 4), with_id("y", pa.int64(), 3)])
    schema = pa.schema([with_id("id", pa.int64(), 1), with_id("place", kind, 2)])
    rows = pa.Table.from_pylist([{"id": 1, "place": {"x": 5, "y": 6}}], schema=schema)

    found = project(rows, NOW, path="f")

    assert found.to_pylist() == [{"id": 1, "place": {"x": 6, "y": 5}}]


def test_columns_without_ids_are_found_by_the_name_mapping_and_get_ids() -> None:
    rows = pa.Table.from_pylist([{"old": 1, "at": {"x": 5, "y": 6}}, {"old": 2, "at": None}])
    names = {"old": MappedField(1, "id", {}), "at": MappedField(2, "place", INSIDE)}

    found = project(rows, NOW, path="f", names=names)

    assert found.schema.equals(NOW, check_metadata=True)
    assert found.to_pylist() == [{"id": 1, "place": {"x": 6, "y": 5}}, {"id": 2, "place": None}]
    with pytest.raises(UnsupportedError, match="lake file 'f' has no field ids"):
        project(rows, NOW, path="f", names={})
