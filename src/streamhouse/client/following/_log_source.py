"""A table's log as the source of a subscription, with a start and a consumer's position."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from streamhouse.client.following._consumer_position import ConsumerPosition
from streamhouse.client.following._log_stream import catch_up, follow
from streamhouse.client.following._source import Source
from streamhouse.client.following._starts import LogStart, offsets_of
from streamhouse.client.http._stop_signal import StopSignal
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.positions._position_reports import (
    PositionReports,
    ReportsPositions,
)
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.client.reads import LogBatch
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.offsets import (
    BucketPositions,
    offsets_in,
    table_of_offsets,
)
from streamhouse.core.model.table import TableInfo

__all__ = ["log_source"]


class _Client(ReportsPositions, Protocol):
    """The client's calls that this module needs."""

    def positions(self, path: str) -> dict[int, BucketPositions]: ...

    def offsets_for_timestamp(
        self, path: str, timestamp_us: int, *, table_id: int | None = None
    ) -> dict[int, int]: ...

    def committed(self, path: str, consumer: str) -> dict[int, int] | None: ...


def log_source(
    client: _Client,
    table: TableInfo,
    start: LogStart,
    *,
    columns: Sequence[str] | None,
    schema_id: int | None,
    consumer: str | None,
    reached: ReachedOffsets,
    transport: HttpTransport,
) -> Source[LogBatch]:
    """Return a subscription's source for one table; `start` is resolved now."""
    if consumer is not None and not consumer.strip():
        raise InvalidRequestError("subscribe: 'consumer' is empty; give it a name, or leave it out")
    path, is_by_commit = str(table.path), start == "committed"
    committed = None
    if is_by_commit:
        if consumer is None:
            raise InvalidRequestError("subscribe: start='committed' needs a 'consumer'")
        committed = client.committed(path, consumer)
    starts = offsets_of(
        start,
        lambda: client.positions(path),
        at_time=lambda time_us: client.offsets_for_timestamp(
            path, time_us, table_id=table.table_id
        ),
        committed=committed,
    )
    table_id = table_of_offsets(starts.offsets.values(), what="subscribe: start")
    table.check_positions(starts.offsets, table_id=table.table_id if table_id is None else table_id)
    if starts.fresh:
        reached.forget(path, starts.fresh)
    consumer_position = None
    if consumer is not None:
        reports = PositionReports.of(client, path, consumer)
        begin = offsets_in(table.table_id, starts.offsets)
        consumer_position = ConsumerPosition(reports, begin, is_by_commit=is_by_commit)
    stop = StopSignal()
    return Source(
        path,
        _batches(
            client,
            transport,
            table,
            starts.offsets,
            columns=columns,
            reached=reached,
            schema_id=table.schema_id if schema_id is None else schema_id,
            stop=stop,
        ),
        stop=stop,
        note=lambda consumer_position, batch: consumer_position.batch_delivered(
            batch.bucket, batch.end_offset
        ),
        consumer_position=consumer_position,
        no_commit=f"the subscription to '{path}' has no 'consumer' whose position to commit",
    )


def _batches(
    client: _Client,
    transport: HttpTransport,
    table: TableInfo,
    start: Mapping[int, int],
    *,
    columns: Sequence[str] | None,
    reached: ReachedOffsets,
    schema_id: int,
    stop: StopSignal,
) -> Generator[LogBatch, None, None]:
    path, positions = str(table.path), dict(start)
    if transport.any_process.is_used:
        # Any process has what the owner has shown; only what is new is the owner's to push.
        ends = {bucket: at.high_watermark for bucket, at in client.positions(path).items()}
        yield from catch_up(
            transport,
            path,
            positions=positions,
            ends=ends,
            table_id=table.table_id,
            columns=columns,
            reached=reached,
            schema_id=schema_id,
            stop=stop,
        )
    yield from follow(
        transport,
        path,
        start=positions,
        table_id=table.table_id,
        columns=columns,
        reached=reached,
        schema_id=schema_id,
        stop=stop,
    )
