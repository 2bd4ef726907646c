"""Planning a batch read of both tiers on one cut of a table, and running it without Spark.

One `TableState` pins everything: the lake snapshot and, from the same instant, the positions of all
buckets. Planning never asks the service again, except to turn a time into log offsets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from streamhouse.connector.options import ReadOptions
from streamhouse.connector.read_plan import SplitSizes, lake_pieces, log_pieces, pack
from streamhouse.connector.scan import LakePiece, Piece, ScanColumn, ScanContext, Split
from streamhouse.connector.scan_schema import output_columns, scan_context, with_field_ids
from streamhouse.connector.split_reader import read_split
from streamhouse.connector.table_name import LOG
from streamhouse.connector.tier_ranges import (
    TierRanges,
    cut_by_tier,
    narrowed,
    readable,
    refuse_loss,
    resolve_starts,
    wanted_ranges,
)
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.client.lake_filesystem import lake_file_properties
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from streamhouse.storage_service.model.lake import LakeCatalog
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.table_state import TableState

if TYPE_CHECKING:
    from streamhouse.connector.lake_planner import LakeTable

__all__ = [
    "LakeScan",
    "ReadPlan",
    "plan_batch_read",
    "plan_lake",
    "plan_ranges",
    "read_context",
    "read_table",
]

_THREADS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """A pinned read: what all splits share, and the splits."""

    context: ScanContext
    splits: Sequence[Split]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeScan:
    """The lake's share of a plan, and the context completed with what only the lake knows."""

    context: ScanContext
    pieces: Sequence[LakePiece]


def plan_batch_read(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
) -> ReadPlan:
    """Plan a batch read of a table, or of one tier of it, on exactly the cut of `state`."""
    check_is_log_table(state)
    name = options.connection.name
    context = replace(
        read_context(state, options, output),
        from_timestamp_us=options.from_timestamp_us,
        to_timestamp_us=options.to_timestamp_us,
    )
    if options.as_of_snapshot is None:
        return plan_ranges(client, state, context, _tier_ranges(client, state, options), options)
    if name.part == LOG:
        raise InvalidRequestError(f"option 'asOfSnapshot' cannot be used with '{name}'")
    scan = plan_lake(
        client, state, context, None, snapshot_id=options.as_of_snapshot, allow_successor=False
    )
    return ReadPlan(context=scan.context, splits=pack(scan.pieces, _split_sizes(options)))


def read_context(
    state: TableState, options: ReadOptions, output: Sequence[ScanColumn]
) -> ScanContext:
    """Return what all splits of a read share, before the lake is looked at."""
    context = scan_context(
        state,
        output=output,
        where=options.where,
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
        scan = plan_lake(client, state, context, tiers.lake)
        context, pieces = scan.context, list(scan.pieces)
    pieces += log_pieces(tiers.log)
    return ReadPlan(context=context, splits=pack(pieces, _split_sizes(options)))


def plan_lake(
    client: StorageClient,
    state: TableState,
    context: ScanContext,
    ranges: Mapping[int, OffsetRange] | None,
    *,
    snapshot_id: int | None = None,
    allow_successor: bool = True,
) -> LakeScan:
    """Plan the lake's rows in `ranges` (None: all) on the state's snapshot, or on `snapshot_id`.

    When maintenance of another engine expired the state's snapshot, its successor is read instead:
    `ranges` cut it to the same rows.
    """
    from streamhouse.connector.lake_pruning import LakeQuery

    catalog = client.lake_catalog()
    lake = open_lake(catalog, state)
    wanted = state.lake.snapshot_id if snapshot_id is None else snapshot_id
    assert wanted is not None, "only a table with a snapshot has lake ranges"
    query = LakeQuery(
        ranges=ranges,
        predicate=context.predicate,
        from_timestamp_us=context.from_timestamp_us,
        to_timestamp_us=context.to_timestamp_us,
    )
    found = lake.plan(
        state.table.schema,
        query,
        snapshot_id=wanted,
        allow_successor=allow_successor and ranges is not None,
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
    return LakeScan(context=context, pieces=pieces)


def open_lake(catalog: LakeCatalog, state: TableState) -> LakeTable:
    """Open the lake table of `state`; raises `SnapshotNotFoundError` before the first round."""
    # The lake library takes half a second to import: only reads that need it pay.
    from streamhouse.connector.lake_planner import open_lake_table

    table = str(state.table.path)
    if state.lake.snapshot_id is None:
        raise SnapshotNotFoundError(f"table '{table}' has no lake snapshot yet: nothing was tiered")
    return open_lake_table(catalog, table, table_uuid=state.lake.table_uuid)


def _split_sizes(options: ReadOptions) -> SplitSizes:
    """Return how to cut a read: by default twice as many splits as the driver has cores."""
    # Twice, so that a core that is done early takes another split.
    default = 2 * (os.cpu_count() or 2)
    return SplitSizes(
        max_split_bytes=options.max_split_bytes, min_partitions=options.min_partitions or default
    )


def check_is_log_table(state: TableState) -> None:
    """Raise `UnsupportedError` for a primary key table: its log alone is not its rows."""
    if state.table.is_primary_key_table:
        raise UnsupportedError(
            f"table '{state.table.path}' has a primary key; reading such tables is not"
            " supported yet"
        )


def _tier_ranges(client: StorageClient, state: TableState, options: ReadOptions) -> TierRanges:
    table = str(state.table.path)
    buckets = readable(state, part=options.connection.name.part)
    starts = resolve_starts(options.starting, buckets, table=table)
    ranges = wanted_ranges(starts, options.ending, buckets, table=table)
    tiers = cut_by_tier(ranges, buckets)
    refuse_loss(tiers.lost, buckets, table=table, fail_on_data_loss=options.fail_on_data_loss)
    from_us, to_us = options.from_timestamp_us, options.to_timestamp_us
    if not tiers.log or (from_us is None and to_us is None):
        return tiers
    log = narrowed(
        tiers.log,
        starts=None if from_us is None else client.offsets_for_timestamp(table, from_us),
        ends=None if to_us is None else client.offsets_for_timestamp(table, to_us),
    )
    return replace(tiers, log=log)


def read_table(client: StorageClient, options: ReadOptions) -> pa.Table:
    """Read a table, or a part of it, into memory without Spark."""
    from streamhouse.connector.metadata_tables import metadata_rows, metadata_schema

    name = options.connection.name
    state = client.table_state(str(name.path))
    if name.is_metadata:
        schema = metadata_schema(name.part, options.columns)
        return metadata_rows(client, state, name.part).select(schema.names)
    output = output_columns(
        state.table.schema,
        columns=options.columns,
        include_metadata=options.include_metadata,
        table=str(name.path),
    )
    plan = plan_batch_read(client, state, options, output)
    return pa.Table.from_batches(_batches(client, plan), schema=plan.context.output_schema)


def _batches(client: StorageClient, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Yield all rows, reading splits in parallel: Parquet decoding leaves the interpreter free."""

    def read(split: Split) -> list[pa.RecordBatch]:
        return list(read_split(split, plan.context, client=client))

    threads = min(_THREADS_MAX, os.cpu_count() or 1, max(1, len(plan.splits)))
    with ThreadPoolExecutor(threads, thread_name_prefix="streamhouse-read") as pool:
        for batches in pool.map(read, plan.splits):
            yield from batches
