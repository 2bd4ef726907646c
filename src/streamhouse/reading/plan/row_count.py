"""Planning how many rows a read has: from positions and manifests where these are exact.

Offsets of a log are dense, and a manifest has the row count of a file. So a piece which is read as
a whole is counted without reading. Tasks count the remaining rows by reading a narrow column: rows
cut off by offsets or times, deleted rows, changes of a table with a primary key, and the rows of a
predicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._splits import SplitSizes, pack
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.row_form import table_columns
from streamhouse.reading.plan.scan_schema import cheapest_column
from streamhouse.reading.scan.scan import LakePiece, LogPiece, Piece, ScanContext, Split

__all__ = ["RowCountPlan", "exact_rows", "plan_row_count"]

_UNCUT: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCountPlan:
    """A read has `row_count` rows, and the rows of the splits."""

    context: ScanContext
    row_count: int
    splits: Sequence[Split]


def plan_row_count(client: StorageClient, state: TableState, options: ReadOptions) -> RowCountPlan:
    """Plan counting the rows of a batch read, on exactly the cut of `state`."""
    output = table_columns(
        state.table,
        columns=[cheapest_column(state.table.schema)],
        include_metadata=False,
        has_change_type=False,
    )
    # A part of a file has about its share of the rows; the whole file has a number.
    uncut = replace(options, max_split_bytes=_UNCUT, min_partitions=1)
    plan = plan_batch_read(client, state, uncut, output)
    if plan.context.keys:
        # Net changes are counted once the changes of a key are together.
        return RowCountPlan(context=plan.context, row_count=0, splits=plan.splits)
    pieces = [piece for split in plan.splits for piece in split.pieces]
    counts = [exact_rows(piece, plan.context) for piece in pieces]
    unknown = [piece for piece, count in zip(pieces, counts, strict=True) if count is None]
    return RowCountPlan(
        context=plan.context,
        row_count=sum(count for count in counts if count is not None),
        splits=pack(unknown, SplitSizes.of(options)) if unknown else [],
    )


def exact_rows(piece: Piece, context: ScanContext) -> int | None:
    """Return the row count of a piece, or None if only reading the piece tells."""
    if context.predicate is not None:
        return None
    if isinstance(piece, LogPiece):
        is_bounded = context.from_timestamp_us is not None or context.to_timestamp_us is not None
        chooses = context.has_changelog and context.change_types is not None
        return None if is_bounded or chooses or piece.retracted is not None else piece.row_count
    if isinstance(piece, LakePiece):
        is_whole = piece.start_byte == 0 and piece.end_byte >= piece.file_bytes
        is_chosen_from = (
            piece.ranges is not None
            or piece.check_timestamp
            or bool(piece.deletes)
            or bool(piece.retracted)
            or (context.lake_is_changelog and context.change_types is not None)
        )
        return piece.row_count if is_whole and not is_chosen_from else None
    return piece.row_count
