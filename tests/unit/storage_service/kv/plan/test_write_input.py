"""What a write may contain: wrong input is refused by a sentence with table, column and row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
    UnsupportedError,
)
from streamhouse.core.model.changelog import (
    OPERATION_DELETE,
    OPERATION_NONE,
    OPERATION_UPSERT,
)
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.plan.write_input import KEY_BYTES_MAX, check_rows
from streamhouse.storage_service.kv.table_rules import TableRules

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            pa.field("city", pa.string(), nullable=False),
            pa.field("id", pa.int32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("size", pa.int64()),
        ]
    )
)
UPSERT, DELETE, NONE = OPERATION_UPSERT, OPERATION_DELETE, OPERATION_NONE


def rules(**properties: str) -> TableRules:
    key = ("city", "id")
    merge = MergeRules.parse(properties, schema=SCHEMA, primary_key=key, table="db.t")
    return TableRules(table="db.t", schema=SCHEMA, primary_key=key, merge=merge)


def rows(**columns: list[Any]) -> pa.RecordBatch:
    types = {column.name: column.type for column in SCHEMA.columns}
    arrays = {n: pa.array(v, types.get(n)) for n, v in columns.items()}
    return pa.RecordBatch.from_pydict(arrays)


def operations(*codes: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    return np.array(codes, dtype=np.int8)


WHOLE = {"city": ["a", "b"], "id": [1, 2], "name": ["x", "y"], "size": [None, 7]}


def test_columns_are_matched_by_name() -> None:
    given = check_rows(rows(**dict(reversed(WHOLE.items()))), rules())

    assert given.rows.to_pydict() == WHOLE
    assert not given.is_partial
    assert given.keys.to_pylist()[0].startswith(b"\x01a\x00\x00\x01")


def test_narrow_numbers_widen() -> None:
    narrow = rows(**WHOLE).set_column(3, "size", pa.array([None, 7], pa.int16()))

    assert check_rows(narrow, rules()).rows.schema == SCHEMA.to_arrow()


def test_rows_that_do_nothing_are_left_out_and_the_others_keep_their_numbers() -> None:
    three = rows(city=["a", "b", "c"], id=[1, 2, 3], name=["x", None, "z"], size=[1, 2, 3])

    given = check_rows(three, rules(), operations=operations(UPSERT, NONE, UPSERT))

    assert given.row_numbers.tolist() == [0, 2]
    assert given.rows.column("city").to_pylist() == ["a", "c"]


def test_a_delete_needs_its_key_only() -> None:
    mixed = rows(city=["a", "b"], id=[1, 2], name=["x", None], size=[None, None])

    given = check_rows(mixed, rules(), operations=operations(UPSERT, DELETE))

    assert given.deletes.tolist() == [False, True]


@pytest.mark.parametrize("columns", [["city", "id"], ["id", "city", "size"]])
def test_deletes_alone_need_no_other_columns(columns: list[str]) -> None:
    part = rows(**{name: WHOLE[name] for name in columns})

    given = check_rows(part, rules(), operations=operations(DELETE, DELETE))

    assert given.deletes.all()
    assert given.rows.schema == SCHEMA.to_arrow()


def test_ignored_deletes_leave_nothing() -> None:
    part = rows(city=["a"], id=[1])

    given = check_rows(
        part, rules(**{"table.delete.behavior": "ignore"}), operations=operations(DELETE)
    )

    assert given.rows.num_rows == 0


def test_a_partial_update_has_exactly_its_columns() -> None:
    part = rows(id=[1], city=["a"], size=[4])

    given = check_rows(part, rules(), columns=["size", "id", "city"])

    assert given.is_partial
    assert given.named == {"city", "id", "size"}
    assert given.rows.column("name").null_count == 1


WITHOUT_KEY = {k: v for k, v in WHOLE.items() if k != "city"}
WITH_MORE = {"citi": WHOLE["city"], **WITHOUT_KEY}


@pytest.mark.parametrize(
    ("given", "codes", "columns", "properties", "error", "sentence"),
    [
        (WHOLE | {"id": [1, None]}, None, None, {}, SchemaMismatchError, "'id' .* row 1 is"),
        (WHOLE | {"name": [None, "y"]}, None, None, {}, SchemaMismatchError, "'name' .* row 0 is"),
        (WITHOUT_KEY, None, None, {}, SchemaMismatchError, "column 'city' is missing"),
        (WITH_MORE, None, None, {}, UnknownColumnError, "did you mean 'city'"),
        (
            WHOLE | {"name": ["x", None]},
            [NONE, UPSERT],
            None,
            {},
            SchemaMismatchError,
            "'name' must not be null, but row 1 is",
        ),
        (
            WHOLE | {"id": [1, None]},
            [UPSERT, DELETE],
            None,
            {},
            SchemaMismatchError,
            "'id' must not be null, but row 1 is",
        ),
        ({"city": ["a"]}, [DELETE], None, {}, SchemaMismatchError, "column 'id' is missing"),
        (
            {"city": ["a"], "id": [1], "nme": [2]},
            [DELETE],
            None,
            {},
            UnknownColumnError,
            "did you mean 'name'",
        ),
        (
            {"city": ["a"], "id": [1]},
            [DELETE],
            None,
            {"table.delete.behavior": "disallow"},
            UnsupportedError,
            "row 0 is a delete, and table.delete.behavior = disallow",
        ),
        (
            WITHOUT_KEY,
            None,
            ["id", "name"],
            {},
            SchemaMismatchError,
            "must name the key column 'city'",
        ),
        (WHOLE, None, ["city", "id", "nme"], {}, UnknownColumnError, "did you mean 'name'"),
        (
            WHOLE,
            None,
            ["city", "id", "name"],
            {},
            SchemaMismatchError,
            "column 'size' is in the data but not among the columns to update",
        ),
        (
            {"city": ["a"], "id": [1]},
            None,
            ["city", "id", "size"],
            {},
            SchemaMismatchError,
            "column 'size' is missing",
        ),
        (
            {"city": ["a"], "id": [1], "size": [1]},
            None,
            ["city", "id", "size"],
            {"table.merge-engine": "first_row"},
            UnsupportedError,
            "first_row takes whole rows",
        ),
        (
            WHOLE,
            None,
            None,
            {
                "table.merge-engine": "versioned",
                "table.merge-engine.versioned.ver-column": "size",
            },
            SchemaMismatchError,
            "version column 'size' must not be null, but row 0 is",
        ),
        (
            WHOLE | {"city": ["a", "b" * KEY_BYTES_MAX]},
            None,
            None,
            {},
            InvalidRequestError,
            r"the key \(city, id\) of row 1 has \d+ bytes; at most",
        ),
    ],
)
def test_wrong_input_is_refused(
    given: dict[str, list[Any]],
    codes: list[int] | None,
    columns: list[str] | None,
    properties: dict[str, str],
    error: type[InvalidRequestError],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        check_rows(
            rows(**given),
            rules(**properties),
            operations=None if codes is None else operations(*codes),
            columns=columns,
        )
    assert "'db.t'" in caught.value.message


def test_a_wrong_type_is_refused_by_column() -> None:
    wrong = rows(**WHOLE).set_column(3, "size", pa.array(["1", "2"]))

    with pytest.raises(SchemaMismatchError, match="'size' is bigint, but the data has string"):
        check_rows(wrong, rules())
