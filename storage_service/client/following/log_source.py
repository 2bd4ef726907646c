"""A table's log as the source of a subscription: where it begins, and where its reader stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamhouse.storage_service.client.following.log_stream import follow
from streamhouse.storage_service.client.following.source import Source
from streamhouse.storage_service.client.following.standing import Standing
from streamhouse.storage_service.client.following.starts import LogStart, offsets_of
from streamhouse.storage_service.client.http.stop_signal import StopSignal
from streamhouse.storage_service.client.http.transport import HttpTransport
from streamhouse.storage_service.client.position_reports import (
    PositionReports,
    ReportsPositions,
)
from streamhouse.storage_service.client.reached_offsets import ReachedOffsets
from streamhouse.storage_service.client.reads import LogBatch
from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.table import TablePath

__all__ = ["log_source"]


class _Client(ReportsPositions, Protocol):
    """What is asked of a client here."""

    def positions(self, path: str) -> dict[int, BucketPositions]: ...

    def offsets_for_timestamp(self, path: str, timestamp_us: int) -> dict[int, int]: ...

    def committed(self, path: str, consumer: str) -> dict[int, int] | None: ...


def log_source(
    client: _Client,
    path: str,
    start: LogStart,
    *,
    columns: Sequence[str] | None,
    schema_id: int,
    consumer: str | None,
    reached: ReachedOffsets,
    transport: HttpTransport,
) -> Source[LogBatch]:
    """Return what a subscription has of one table; `start` is looked up now."""
    by_commit = start == "committed"
    committed = None
    if by_commit:
        if consumer is None:
            raise InvalidRequestError("subscribe: start='committed' needs a 'consumer'")
        committed = client.committed(path, consumer)
    starts = offsets_of(
        start,
        lambda: client.positions(path),
        at_time=lambda timestamp_us: client.offsets_for_timestamp(path, timestamp_us),
        committed=committed,
    )
    if starts.anew:
        reached.forget(str(TablePath.parse(path)), starts.anew)
    standing = None
    if consumer is not None:
        reports = PositionReports.of(client, path, consumer)
        standing = Standing(reports, starts.offsets, by_commit=by_commit)
    stop = StopSignal()
    return Source(
        path,
        follow(
            transport,
            path,
            start=starts.offsets,
            columns=columns,
            reached=reached,
            schema_id=schema_id,
            stop=stop,
        ),
        stop=stop,
        note=lambda standing, batch: standing.handed(batch.bucket, batch.end_offset),
        standing=standing,
        no_commit=f"the subscription to '{path}' has no 'consumer' whose position to commit",
    )
