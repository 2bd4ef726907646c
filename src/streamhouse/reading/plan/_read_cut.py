"""One cut of a table, from which every way of reading makes its plan.

A cut is a lake snapshot with offsets in it, and offsets of the log. The service's state of the
table, the lake and the offsets are looked up once, before the cut; a cut sends no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamhouse.client import StorageClient
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._lake_cut import LakeCut, cut_lake
from streamhouse.reading.plan._lake_or_log import TierRanges
from streamhouse.reading.plan._splits import (
    SplitSizes,
    lake_pieces,
    log_pieces,
    one_split_a_bucket,
    pack,
)
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import scan_context
from streamhouse.reading.scan.scan import Piece, ScanContext, Split, without_retracted

if TYPE_CHECKING:
    from streamhouse.reading.files.planner import LakeFiles

__all__ = ["CutPieces", "ReadPlan", "TableCut", "cut_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """A pinned read: the splits, and what all splits share."""

    context: ScanContext
    splits: Sequence[Split]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPieces:
    """The pieces of a cut, first the pieces of the lake, and the lake files of the pieces."""

    pieces: Sequence[Piece]
    files: LakeFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCut:
    """A table at one instant: the offsets of a read in the lake and in the log.

    `retracted` has the offsets of skipped versions by bucket, ascending. With `is_ordered` one task
    reads all log rows of a bucket, so the changes of a key keep their order.
    """

    table: TableInfo
    lake: LakeCut | None = None
    log: Mapping[int, OffsetRange] = field(default_factory=dict)
    retracted: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    is_ordered: bool = False

    def pieces(self, rows: RowRequest) -> CutPieces:
        """Return the pieces with the requested rows, each row in one piece."""
        files, pieces = None, list[Piece]()
        if self.lake is not None:
            files = self.lake.files(self.table, rows)
            pieces += lake_pieces(
                files.files,
                self.lake.ranges,
                from_timestamp_us=rows.from_timestamp_us,
                to_timestamp_us=rows.to_timestamp_us,
            )
        pieces += log_pieces(self.log, is_ordered=self.is_ordered)
        if self.retracted:
            pieces = without_retracted(pieces, self.retracted)
        return CutPieces(pieces=pieces, files=files)

    def plan(self, rows: RowRequest, options: ReadOptions) -> ReadPlan:
        """Plan the requested rows, in splits of the sizes in the options."""
        cut = self.pieces(rows)
        is_changelog = self.lake is not None and self.lake.role is LakeRole.CHANGES
        if is_changelog:
            splits = one_split_a_bucket(cut.pieces)
        else:
            splits = pack(cut.pieces, SplitSizes.of(options))
        context = scan_context(
            self.table,
            rows,
            files=cut.files,
            lake_properties={} if self.lake is None else self.lake.file_properties,
            lake_is_changelog=is_changelog,
        )
        return ReadPlan(context=context, splits=splits)


def cut_table(
    client: StorageClient,
    state: TableState,
    tiers: TierRanges,
    *,
    is_changelog: bool,
    is_union: bool,
) -> TableCut:
    """Return the cut with exactly the offsets of `tiers`; the lake is opened only for lake offsets.

    With `is_changelog` the lake's rows are the full history. `is_union` checks for one history of
    lake and log.
    """
    lake = None
    if tiers.lake:
        lake = cut_lake(client, state, tiers.lake, is_changelog=is_changelog, is_union=is_union)
    # What is no row of a table with keys is one of its changes.
    is_ordered = state.table.is_primary_key_table
    return TableCut(table=state.table, lake=lake, log=tiers.log, is_ordered=is_ordered)
