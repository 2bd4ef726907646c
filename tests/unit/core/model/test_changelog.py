"""Change types by name, and the retraction rule on small examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import CorruptDataError, SchemaMismatchError
from streamhouse.core.model.changelog import (
    CHANGE_TYPE_NAMES,
    DELETE,
    INSERT,
    OPERATION_DELETE,
    OPERATION_NONE,
    OPERATION_UPSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    FoldedTail,
    change_type_names,
    changelog_schema,
    fold_tail,
    operations_of,
    replaced_before,
)
from streamhouse.core.model.schema import Schema

UPSERT = OPERATION_UPSERT


def test_codes_are_what_lies_on_disk() -> None:
    assert CHANGE_TYPE_NAMES == ("+A", "+I", "-U", "+U", "-D")
    assert (INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE) == (1, 2, 3, 4)
    assert change_type_names(pa.array([4, 1], pa.int8())).to_pylist() == ["-D", "+I"]


def test_a_changelog_has_the_columns_and_two_more() -> None:
    schema = Schema.from_arrow(pa.schema([pa.field("id", pa.int64(), nullable=False)]))

    assert changelog_schema(schema) == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("__change_type", pa.int8(), nullable=False),
            pa.field("__retracts", pa.int64()),
        ]
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["+I", "-U", "+U", "-D", "+A"],
            [UPSERT, OPERATION_NONE, UPSERT, OPERATION_DELETE, UPSERT],
        ),
        (["c", "r", "u", "d"], [UPSERT, UPSERT, UPSERT, OPERATION_DELETE]),
        (
            ["insert", "update_preimage", "update_postimage", "delete"],
            [UPSERT, OPERATION_NONE, UPSERT, OPERATION_DELETE],
        ),
        (
            ["INSERT", "UPDATE_BEFORE", "Update_After", "DELETE", "+I"],
            [UPSERT, OPERATION_NONE, UPSERT, OPERATION_DELETE, UPSERT],
        ),
        ([1, 2, 3, 4], [UPSERT, OPERATION_NONE, UPSERT, OPERATION_DELETE]),
        ([], []),
    ],
)
def test_operations_by_name_and_code(given: list[Any], expected: list[int]) -> None:
    array = pa.array(given, pa.int8() if given and isinstance(given[0], int) else pa.string())

    assert operations_of(array, table="db.t").tolist() == expected
    assert operations_of(array.dictionary_encode(), table="db.t").tolist() == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (pa.array(["+I", "t"]), "'db.t': __change_type of row 1 is 't'"),
        (pa.array(["INSERT", "inserted"]), "row 1 is 'inserted'"),
        (pa.array(["+I", None]), "row 1 is None"),
        (pa.array([1, 9], pa.int8()), "row 1 is 9"),
        (pa.array([1, None], pa.int8()), "row 1 is None"),
        (pa.array([1.5]), "must be a string"),
    ],
)
def test_other_change_types_are_refused_by_row(given: pa.Array, sentence: str) -> None:
    with pytest.raises(SchemaMismatchError, match=sentence):
        operations_of(given, table="db.t")


def _fold(lines: list[tuple[int, int, int | None]], *, boundary: int) -> FoldedTail:
    """Fold lines of (offset, change type, retracts)."""
    offsets, types, retracts = zip(*lines, strict=True) if lines else ((), (), ())
    return fold_tail(
        np.array(types, dtype=np.int8),
        np.array([-1 if r is None else r for r in retracts], dtype=np.int64),
        np.array(offsets, dtype=np.int64),
        boundary=boundary,
    )


def test_retractions_below_the_boundary_are_told_and_above_it_are_resolved() -> None:
    lines = [
        (10, UPDATE_BEFORE, None),
        (11, UPDATE_AFTER, 7),
        (12, INSERT, None),
        (13, UPDATE_AFTER, 11),
        (14, DELETE, 12),
        (15, DELETE, 3),
    ]

    folded = _fold(lines, boundary=10)

    assert folded.retracted.tolist() == [3, 7]
    assert folded.survives.tolist() == [False, False, False, True, False, False]


def test_a_piece_without_before_images_folds_alike() -> None:
    """A reader may leave `-U` out, and offsets have gaps then."""
    lines = [(11, UPDATE_AFTER, 7), (13, UPDATE_AFTER, 11), (17, DELETE, 13)]

    folded = _fold(lines, boundary=10)

    assert folded.retracted.tolist() == [7]
    assert not folded.survives.any()


def test_a_cut_between_the_images_keeps_the_old_version_on_the_left() -> None:
    left = _fold([(0, INSERT, None), (1, UPDATE_BEFORE, None)], boundary=0)
    right = _fold([(2, UPDATE_AFTER, 0)], boundary=2)

    assert left.survives.tolist() == [True, False]
    assert right.retracted.tolist() == [0]
    assert right.survives.tolist() == [True]


def test_nothing_folds_to_nothing() -> None:
    folded = _fold([], boundary=5)

    assert len(folded.retracted) == len(folded.survives) == 0


def test_a_change_is_followed_back_to_the_version_before_the_boundary() -> None:
    retracts = np.array([7, -1, 10, -1, 11, 14, 12, 3], dtype=np.int64)

    replaced = replaced_before(retracts, boundary=10)

    assert replaced.tolist() == [7, -1, 7, -1, -1, -1, 7, 3]


def test_a_change_never_retracts_itself_or_a_later_one() -> None:
    for retracted in (11, 12):
        with pytest.raises(CorruptDataError, match=f"offset 11 retracts offset {retracted}"):
            replaced_before(np.array([-1, retracted, -1], dtype=np.int64), boundary=10)
