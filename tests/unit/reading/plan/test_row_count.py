"""Which pieces of a read say exactly how many rows they have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamhouse.core.model.offsets import OffsetRange
from streamhouse.lake.files.deletes.deleted_positions import DeleteFile
from streamhouse.reading.plan.row_count import exact_rows
from streamhouse.reading.scan._retraction import UPSERTS
from streamhouse.reading.scan.scan import (
    LakePiece,
    LogPiece,
    Piece,
    RetractedOffsets,
    RowsPiece,
    ScanContext,
)
from streamhouse.reading.where.predicate import Constant, Predicate
from tests.support.scan_context import scan_context

CONTEXT = scan_context()
LOG = LogPiece(bucket=0, start=10, end=25)
LAKE = LakePiece(path="f", file_bytes=100, start_byte=0, end_byte=100, row_count=7)
RETRACTED = RetractedOffsets(bucket=0, first=12, gap_bytes=1, gaps=b"")
RANGE = OffsetRange(bucket=0, start=0, end=5)
PREDICATE = Predicate(Constant(True))


def test_whole_pieces_know_their_rows() -> None:
    assert exact_rows(LOG, CONTEXT) == 15
    assert exact_rows(LAKE, CONTEXT) == 7
    assert exact_rows(RowsPiece(stream=b"", row_count=3), CONTEXT) == 3


@pytest.mark.parametrize(
    ("piece", "context"),
    [
        (LOG, replace(CONTEXT, predicate=PREDICATE)),
        (LOG, replace(CONTEXT, from_timestamp_us=0)),
        (LOG, replace(CONTEXT, to_timestamp_us=0)),
        (LOG, replace(CONTEXT, has_changelog=True, change_types=UPSERTS)),
        (replace(LOG, retracted=RETRACTED), CONTEXT),
        (LAKE, replace(CONTEXT, predicate=PREDICATE)),
        (LAKE, replace(CONTEXT, lake_is_changelog=True, change_types=UPSERTS)),
        (replace(LAKE, end_byte=99), CONTEXT),
        (replace(LAKE, start_byte=1), CONTEXT),
        (replace(LAKE, ranges=(RANGE,)), CONTEXT),
        (replace(LAKE, check_timestamp=True), CONTEXT),
        (replace(LAKE, deletes=(DeleteFile(path="d", file_bytes=1),)), CONTEXT),
        (replace(LAKE, retracted=(RETRACTED,)), CONTEXT),
    ],
)
def test_rows_that_may_be_left_out_are_counted_by_reading(
    piece: Piece, context: ScanContext
) -> None:
    assert exact_rows(piece, context) is None
