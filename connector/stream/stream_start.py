"""Where a stream without a checkpoint starts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

from streamhouse.connector.options.options import ReadOptions
from streamhouse.connector.plan.key_table_read import ends_at
from streamhouse.connector.plan.tier_ranges import readable, resolve_starts
from streamhouse.connector.plan.time_lookup import offsets_at
from streamhouse.connector.stream.snapshot_pin import SnapshotPin
from streamhouse.connector.stream.stream_position import Bootstrap, StreamPosition
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import OffsetOutOfRangeError, UnavailableError
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["start_of_stream"]

_PIN_ATTEMPTS_MAX: Final = 5


def start_of_stream(
    client: StorageClient, state: TableState, options: ReadOptions, pin: SnapshotPin
) -> StreamPosition:
    """Return the first position of a stream; what it bootstraps from is pinned."""
    name, table_id = options.connection.name, state.table.table_id
    if options.from_timestamp_us is not None:
        offsets = _offsets_since(client, state, options, options.from_timestamp_us)
        return StreamPosition(table_id=table_id, offsets=offsets)
    is_bootstrap = (
        state.table.is_primary_key_table and not name.part and options.starting.kind == "full"
    )
    if is_bootstrap and state.lake.snapshot_id is not None:
        return _bootstrap(client, state, pin)
    starts = resolve_starts(
        options.starting, readable(state, part=name.part), table=str(state.table.path)
    )
    if is_bootstrap and options.fail_on_data_loss:
        _refuse_cut_log(state)
    return StreamPosition(table_id=table_id, offsets=starts)


def _offsets_since(
    client: StorageClient, state: TableState, options: ReadOptions, timestamp_us: int
) -> Mapping[int, int]:
    if not state.table.is_primary_key_table or state.lake.changelog is not None:
        return offsets_at(client, state, timestamp_us)
    if options.fail_on_data_loss:
        return ends_at(client, state, timestamp_us)
    return client.offsets_for_timestamp(str(state.table.path), timestamp_us)


def _bootstrap(client: StorageClient, state: TableState, pin: SnapshotPin) -> StreamPosition:
    """Pin the table's lake snapshot and return the position before its first row."""
    holder = f"stream-{uuid.uuid4()}"
    table = str(state.table.path)
    for _ in range(_PIN_ATTEMPTS_MAX):
        snapshot_id = state.lake.snapshot_id
        assert snapshot_id is not None, "a table's lake does not go away"
        ends = {bucket: at.tiered_offset for bucket, at in state.positions.items()}
        bootstrap = Bootstrap(snapshot_id=snapshot_id, ends=ends, pin=holder)
        client.pin_snapshot(table, snapshot_id, holder=holder, ttl_s=60.0)
        state = client.table_state(table)
        # What is current after it was pinned was not expired before.
        if state.lake.snapshot_id == snapshot_id:
            pin.hold(bootstrap)
            start = StreamPosition(
                table_id=state.table.table_id, offsets=dict.fromkeys(ends, 0), bootstrap=bootstrap
            )
            return start.advanced(start.offsets)
    raise UnavailableError(
        f"table '{table}': its lake snapshot changed {_PIN_ATTEMPTS_MAX} times while the stream"
        " tried to pin it; try again"
    )


def _refuse_cut_log(state: TableState) -> None:
    for bucket, at in sorted(state.positions.items()):
        if at.log_start_offset:
            raise OffsetOutOfRangeError(
                f"table '{state.table.path}', bucket {bucket}: changes [0, {at.log_start_offset})"
                " have left the log (table.log.ttl) and are in no lake snapshot, so a stream cannot"
                " start with the table's rows; start with the changes there are by"
                " startingOffsets=earliest"
            )
