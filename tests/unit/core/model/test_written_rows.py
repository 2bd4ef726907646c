"""Which columns the rows of a write mean, after their names went to other columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    ColumnDroppedError,
    SchemaMismatchError,
    UnknownColumnError,
)
from streamhouse.core.model.casts.written_rows import (
    check_dropped,
    check_names,
    check_staged,
    current_columns,
    in_current_version,
    staged_schema,
    stored_version_of,
    version_of,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath


def _info(*changes: dict[str, Any], **fields: Any) -> TableInfo:
    """Return a table with columns id, a and b, and one version more for each change."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("a", pa.int32()),
                        ("b", pa.int32())])  # fmt: skip
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(schema), **fields
    )
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    for change in changes:
        info = change_schema(info, [change])
    return info


ADD = {"add": "c", "type": "int"}
DROP = {"drop": "a", "confirm": "a"}
SWAP = ({"rename": "a", "to": "x"}, {"rename": "b", "to": "a"}, {"rename": "x", "to": "b"})


def _rows(**values: Any) -> pa.RecordBatch:
    types = {"id": pa.int64()}
    arrays = {name: pa.array([v], types.get(name, pa.int32())) for name, v in values.items()}
    return pa.RecordBatch.from_pydict(arrays)


def _version(info: TableInfo, stated: int, *names: str) -> int:
    return version_of(info, pa.schema([(name, pa.int32()) for name in names]), stated=stated)


def test_only_versions_to_which_columns_were_merely_added_are_meant_by_their_columns() -> None:
    assert _version(_info(ADD), 1, "b", "a", "id") == 0
    again = _info(DROP, {"add": "a", "type": "int"})
    assert _version(again, 2, "id", "a", "b") == 2
    assert _version(again, 2, "id", "b") == 1
    assert _version(again, 0, "id", "a", "b") == 0
    # An older version has these columns, and another `a`.
    lost = _info(DROP, ADD, {"add": "a", "type": "int"}, {"drop": "c", "confirm": "c"}, ADD)
    assert _version(lost, 5, "id", "a", "b") == 4
    assert _version(_info(*SWAP), 3, "id", "a", "b") == 3
    assert _version(_info({"rename": "a", "to": "x"}), 1, "id", "a", "b") == 1


def test_a_name_that_another_column_had_is_refused_to_who_says_no_version() -> None:
    info = _info(DROP, {"add": "a", "type": "int"})

    check_names(info, ["id", "b", "unknown"])
    with pytest.raises(SchemaMismatchError, match=r"column 'a' was another column in version 0.*"
                       r"send schema_id=2 "):  # fmt: skip
        check_names(info, ["id", "a"])
    with pytest.raises(SchemaMismatchError, match="set option x to write"):
        check_names(_info(*SWAP), ["b"], how="set option x")


def test_columns_are_called_now_as_they_are_where_they_went() -> None:
    info = _info(*SWAP)

    assert current_columns(info, ["b", "id"], schema_id=0) == ["a", "id"]
    assert current_columns(info, ["b", "id"], schema_id=3) == ["b", "id"]
    with pytest.raises(UnknownColumnError, match="'c'"):
        current_columns(info, ["c"], schema_id=0)
    with pytest.raises(ColumnDroppedError, match="'a' was dropped since version 0 "):
        current_columns(_info(DROP), ["id", "a"], schema_id=0)


def test_partial_rows_go_where_their_columns_went() -> None:
    info = _info(*SWAP, ADD, {"widen": "b", "to": "bigint"})

    rows = in_current_version(info, _rows(a=1, id=7), schema_id=0, is_partial=True)

    assert rows.to_pylist() == [{"id": 7, "b": 1}]
    assert rows.schema.field("b").type == pa.int64()


def test_a_value_of_a_dropped_column_is_refused_and_a_null_is_not() -> None:
    info = _info(DROP, {"add": "a", "type": "int"})

    check_dropped(info, _rows(id=1, a=None, b=2), schema_id=0)
    check_dropped(info, _rows(id=1, a=5, b=2), schema_id=0, deletes=np.array([True]))
    with pytest.raises(ColumnDroppedError, match="the current 'a' is another column"):
        check_dropped(info, _rows(id=1, a=5, b=2), schema_id=0)


def test_staged_rows_are_of_the_version_that_they_were_staged_by() -> None:
    info = _info(DROP, {"add": "a", "type": "int", "after": "id"})
    staged = staged_schema(info, 0)
    read_again = pa.ipc.read_schema(staged.serialize())

    assert stored_version_of(info, read_again) == 0
    # Parts of before say no version: the newest that looks like them.
    assert stored_version_of(info, staged.remove_metadata()) == 2
    check_staged(info, staged_schema(info, 2))
    with pytest.raises(ColumnDroppedError, match="'a' was dropped since version 0 "):
        check_staged(info, read_again)
