"""Planning the rows of one tier, or of offset ranges over both, on one pinned state of a table.

Planning never asks the service again; the lake is opened only where it has rows that are wanted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamhouse.client import StorageClient
from streamhouse.core.errors import SnapshotNotFoundError
from streamhouse.core.extras import require
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table_state import TableState
from streamhouse.lake.files.lake_filesystem import lake_file_properties
from streamhouse.lake.files.partition_layout import lake_clustering
from streamhouse.reading.options.connection import LAKE
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._read_plan import (
    FILE_OPEN_BYTES,
    SplitSizes,
    lake_pieces,
    log_pieces,
    one_split_a_bucket,
    pack,
)
from streamhouse.reading.plan._tier_ranges import TierRanges
from streamhouse.reading.plan.scan_schema import scan_context, with_field_ids
from streamhouse.reading.scan.scan import LakePiece, Piece, ScanColumn, ScanContext, Split

if TYPE_CHECKING:
    from streamhouse.reading.files.planner import LakeTable

__all__ = [
    "LakeScan",
    "ReadPlan",
    "open_lake",
    "plan_lake",
    "plan_ranges",
    "read_context",
    "split_sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """A pinned read: what all splits share, and the splits."""

    context: ScanContext
    splits: Sequence[Split]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeScan:
    """The lake's share of a plan, and the context completed with what only the lake knows.

    `read_bytes` is about what it takes to read the pieces, opening files included.
    """

    context: ScanContext
    pieces: Sequence[LakePiece]
    read_bytes: int


def read_context(
    state: TableState, options: ReadOptions, output: Sequence[ScanColumn]
) -> ScanContext:
    """Return what all splits of a read share, before the lake is looked at."""
    context = scan_context(
        state,
        output=output,
        where=options.where,
        time_zone=options.time_zone,
        endpoint=options.connection.endpoint,
        token=options.connection.token,
    )
    return replace(context, fail_on_data_loss=options.fail_on_data_loss)


def plan_ranges(
    client: StorageClient,
    state: TableState,
    context: ScanContext,
    tiers: TierRanges,
    options: ReadOptions,
) -> ReadPlan:
    """Plan exactly the rows of `tiers`; the lake is opened only if it has some of them."""
    pieces: list[Piece] = []
    if tiers.lake:
        is_union = options.connection.name.part != LAKE
        scan = plan_lake(client, state, context, tiers.lake, is_union=is_union)
        context, pieces = scan.context, list(scan.pieces)
    # A task that reads a bucket's changes alone keeps the order of each key's changes.
    pieces += log_pieces(tiers.log, is_ordered=context.has_changelog)
    if tiers.lake and context.lake_is_changelog:
        return ReadPlan(context=context, splits=one_split_a_bucket(pieces))
    return ReadPlan(context=context, splits=pack(pieces, split_sizes(options)))


def plan_lake(
    client: StorageClient,
    state: TableState,
    context: ScanContext,
    ranges: Mapping[int, OffsetRange] | None,
    *,
    snapshot_id: int | None = None,
    allow_successor: bool = True,
    is_union: bool = True,
) -> LakeScan:
    """Plan the lake's rows in `ranges` (None: all) on the state's snapshot, or on `snapshot_id`.

    When maintenance of another engine expired the state's snapshot, its successor is read instead:
    `ranges` cut it to the same rows. Of a primary key table only a successor that covers the same
    offsets has the same rows: a later one lacks those that were retracted since. A full history
    only grows.

    Raises `HistoryDivergedError` if the rows are to be read with the log's (`is_union`), and the
    lake has another history than that.
    """
    require("lake", "reading rows that were tiered")
    from streamhouse.reading.files._pruning import LakeQuery

    catalog = client.lake_catalog()
    if context.lake_is_changelog:
        lake, covers = _open_history(catalog, state), None
        wanted = None if state.lake.changelog is None else state.lake.changelog.snapshot_id
    else:
        lake = open_lake(catalog, state)
        covers = state.lake.tiered_offsets if state.table.is_primary_key_table else None
        wanted = state.lake.snapshot_id if snapshot_id is None else snapshot_id
        if snapshot_id is None and lake.may_have_other_rows(state.table, wanted or 0):
            wanted = _looked_at(client, state)
            # Another commit may have come since it was opened.
            lake = open_lake(catalog, state)
            if ranges is not None and lake.may_have_other_rows(state.table, wanted or 0):
                # A round lies between that is not reported yet: cut, its rows are the same.
                wanted = lake.newest_with(ranges) or wanted
    if is_union:
        _check_history(client, state, lake, is_changelog=context.lake_is_changelog)
    assert wanted is not None, "only a table with a snapshot has lake ranges"
    query = LakeQuery(
        ranges=ranges,
        predicate=context.predicate,
        from_timestamp_us=context.from_timestamp_us,
        to_timestamp_us=context.to_timestamp_us,
        clustering=lake_clustering(state.table.descriptor, role=state.lake.role),
    )
    found = lake.plan(
        state.table.schema,
        query,
        snapshot_id=wanted,
        successor_of=state.table if allow_successor and ranges is not None else None,
        own_ids=state.table.column_ids,
        successor_covers=covers,
    )
    context = replace(
        with_field_ids(context, found.field_ids),
        lake_properties=lake_file_properties(catalog.properties),
        lake_snapshot_id=found.snapshot_id,
    )
    pieces = lake_pieces(
        found.files,
        ranges,
        from_timestamp_us=context.from_timestamp_us,
        to_timestamp_us=context.to_timestamp_us,
    )
    read_bytes = found.read_bytes + len(pieces) * FILE_OPEN_BYTES
    return LakeScan(context=context, pieces=pieces, read_bytes=read_bytes)


def _looked_at(client: StorageClient, state: TableState) -> int | None:
    """Return the snapshot to read, after another engine committed to the rows of a log table.

    The service is asked, which registers it: other reads, and what is kept of such, go by it too.
    """
    lake = client.look_at_lake(str(state.table.path))
    is_same_cut = lake.tiered_offsets == state.lake.tiered_offsets and (
        lake.truncated_offsets == state.lake.truncated_offsets
    )
    return lake.snapshot_id if is_same_cut else state.lake.snapshot_id


def _check_history(
    client: StorageClient, state: TableState, lake: LakeTable, *, is_changelog: bool
) -> None:
    """Raise `HistoryDivergedError` if the lake as it is now has another history than the log.

    The service is asked only when the lake is not what it has registered: rounds go on meanwhile.
    """
    known = state.lake.changelog if is_changelog else state.lake
    role = LakeRole.CHANGES if is_changelog else state.lake.role
    covered = lake.covered(state.table.table_id, role)
    if known is None or covered is None:
        return
    if covered.tiered_offsets != known.tiered_offsets or any(
        known.fingerprints.get(bucket, said) != said
        for bucket, said in covered.fingerprints.items()
    ):
        table = state.table
        client.check_lake_history(str(table.path), covered, table_id=table.table_id)


def open_lake(catalog: LakeCatalog, state: TableState) -> LakeTable:
    """Open the lake table that `state` is about, of the rows or of the batch layout.

    Raises `SnapshotNotFoundError` before the first round.
    """
    # The lake library takes half a second to import: only reads that need it pay.
    require("lake", "reading rows that were tiered")
    from streamhouse.reading.files.planner import open_lake_table

    table = str(state.table.path)
    if state.lake.snapshot_id is None:
        raise SnapshotNotFoundError(f"table '{table}' has no lake snapshot yet: nothing was tiered")
    name = state.lake.role.lake_name(table)
    return open_lake_table(catalog, name, table_uuid=state.lake.table_uuid)


def _open_history(catalog: LakeCatalog, state: TableState) -> LakeTable:
    """Open the lake table of all changes."""
    require("lake", "reading changes that were tiered")
    from streamhouse.reading.files.planner import open_lake_table

    history = state.lake.changelog
    assert history is not None, "only a table with a full history has changes in the lake"
    name = LakeRole.CHANGES.lake_name(str(state.table.path))
    return open_lake_table(catalog, name, table_uuid=history.table_uuid)


def split_sizes(options: ReadOptions) -> SplitSizes:
    """Return how to cut a read: by default twice as many splits as the driver has cores."""
    # Twice, so that a core that is done early takes another split.
    default = 2 * (os.cpu_count() or 2)
    return SplitSizes(
        max_split_bytes=options.max_split_bytes, min_partitions=options.min_partitions or default
    )
