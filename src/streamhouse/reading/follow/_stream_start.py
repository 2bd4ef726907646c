"""Where a stream without a checkpoint starts: at offsets, at a time, or at a pinned snapshot."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.table_state import TableState
from streamhouse.core.threads import NamedThread
from streamhouse.reading.follow.stream_position import Bootstrap, StreamPosition
from streamhouse.reading.options.connection import LOG
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._lake_or_log import (
    check_table_id,
    readable,
    refuse_lost_changes,
    resolve_starts,
)

__all__ = ["SnapshotPin", "start_of_stream"]

_log = logging.getLogger(__name__)

PIN_TTL_S: Final = 3_600.0
"""How long a stream may be stopped in the middle of a bootstrap and still find its snapshot."""

RENEWAL_S: Final = 300.0
_PIN_ATTEMPTS_MAX: Final = 5


def start_of_stream(
    client: StorageClient, state: TableState, options: ReadOptions, pin: SnapshotPin
) -> StreamPosition:
    """Return the first position of a stream; what it bootstraps from is pinned."""
    name, table_id = options.connection.name, state.table.table_id
    is_bootstrap = (
        state.table.is_primary_key_table
        and not name.part
        and options.starting.kind == "full"
        and options.from_timestamp_us is None
    )
    if not is_bootstrap:
        refuse_lost_changes(client, state, options)
    if options.from_timestamp_us is not None:
        offsets = _offsets_since(client, state, options, options.from_timestamp_us)
        return StreamPosition(table_id=table_id, offsets=offsets)
    if is_bootstrap and state.lake.snapshot_id is not None:
        return _bootstrap(client, state, pin)
    check_table_id(state.table, options)
    starts = resolve_starts(
        options.starting, readable(state, part=name.part), table=str(state.table.path)
    )
    if is_bootstrap and options.fail_on_data_loss:
        _refuse_cut_log(state)
    return StreamPosition(table_id=table_id, offsets=starts)


def _offsets_since(
    client: StorageClient, state: TableState, options: ReadOptions, timestamp_us: int
) -> Mapping[int, int]:
    name, start = options.connection.name, None
    if name.part == LOG:
        start = {bucket: at.log_start_offset for bucket, at in state.positions.items()}
    return client.offsets_for_timestamp(
        str(name.path),
        timestamp_us,
        start=start,
        skip_lost=not options.fail_on_data_loss,
        table_id=state.table.table_id,
    )


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


class SnapshotPin:
    """At most one pin of one table, renewed in the background until the release.

    Spark tells a source neither the end of a query nor the duration of a micro-batch: when the
    process is gone, its pin ends after `PIN_TTL_S`. A renewal is repeated while the service is
    unreachable; a lost snapshot is noticed when it is read.
    """

    def __init__(self, client: Callable[[], StorageClient], table: str) -> None:
        self._client = client
        self._table = table
        self._held: Bootstrap | None = None
        self._released = threading.Event()

    def hold(self, bootstrap: Bootstrap) -> None:
        """Pin the bootstrap's snapshot and keep it pinned; repeated calls are free."""
        if self._held is not None and self._held.pin == bootstrap.pin:
            return
        self.release()
        self._pin(bootstrap)
        self._held = bootstrap
        self._released = threading.Event()
        # A daemon: the process may end at any time.
        NamedThread("streamhouse-snapshot-pin", self._renew, (bootstrap, self._released)).start()

    def release(self) -> None:
        """End the pin, if there is one."""
        if self._held is None:
            return
        self._released.set()
        pin, self._held = self._held.pin, None
        try:
            self._client().unpin_snapshot(self._table, holder=pin)
        except StreamhouseError as error:
            _log.warning("event=unpin_failed table=%s why=%r", self._table, error)

    def leave(self) -> None:
        """Stop renewing the pin, which lasts for `PIN_TTL_S` more, for a reader that continues."""
        self._released.set()
        self._held = None

    def _renew(self, bootstrap: Bootstrap, released: threading.Event) -> None:
        while not released.wait(RENEWAL_S):
            try:
                self._pin(bootstrap)
            except StreamhouseError as error:
                _log.warning("event=pin_failed table=%s why=%r", self._table, error)

    def _pin(self, bootstrap: Bootstrap) -> None:
        self._client().pin_snapshot(
            self._table, bootstrap.snapshot_id, holder=bootstrap.pin, ttl_s=PIN_TTL_S
        )
