"""The lag of a table's consumers: in rows, in time, and before retention.

Unread rows are counted on one cut of the table. The age of the oldest unread row needs a look at
the log, once for each position of a consumer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.consumers import Consumer, ConsumerKey
from streamhouse.storage_service.engine.open_table import OpenTable

__all__ = [
    "ConsumerLag",
    "consumer_lags",
    "first_wanted",
    "lag_now",
    "lag_of",
    "tell_of_lost_rows",
    "tell_of_rows_at_risk",
]

_logger = logging.getLogger(__name__)

_WARN_PERCENT: Final = 80
"""Share of `table.log.ttl` after which it is said that nobody has read a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLag:
    """The lag of one consumer.

    `lag_ms` is the age of the oldest unread row, 0 without unread rows; None if the row is only in
    the lake. `rows_at_risk` are unread rows that retention deletes soon.
    """

    consumer: Consumer
    rows: int
    lag_ms: int | None
    rows_at_risk: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return self.consumer.to_json() | {
            "lag_rows": self.rows,
            "lag_ms": self.lag_ms,
            "rows_at_risk": self.rows_at_risk,
        }


async def consumer_lags(table: OpenTable, runtime: Runtime) -> list[ConsumerLag]:
    """Return the lag of each consumer of the table, by owner and name."""
    consumers = table.readers()
    if not consumers:
        return []
    unknown = _all_places(table, consumers) - table.consumers.written_us.keys()
    read_times = await runtime.run(_read_times, table, sorted(unknown)) if unknown else {}
    # What others have asked for or reported meanwhile counts, too.
    times, consumers = {**table.consumers.written_us, **read_times}, table.readers()
    places = _all_places(table, consumers)
    table.consumers.written_us = {place: times[place] for place in places & times.keys()}
    return [lag_of(table, consumer, now_us=runtime.clock_us()) for consumer in consumers]


async def lag_now(table: OpenTable, consumer: Consumer, runtime: Runtime) -> ConsumerLag:
    """Return the lag of one consumer, independent of the table's other consumers."""
    unknown = set(_places(table, consumer)) - table.consumers.written_us.keys()
    if unknown:
        # Who asks for all consumers forgets those that nobody stands at any more.
        table.consumers.written_us |= await runtime.run(_read_times, table, sorted(unknown))
    return lag_of(table, consumer, now_us=runtime.clock_us())


def _all_places(table: OpenTable, consumers: Iterable[Consumer]) -> set[tuple[int, int]]:
    return {place for consumer in consumers for place in _places(table, consumer)}


def lag_of(table: OpenTable, consumer: Consumer, *, now_us: int) -> ConsumerLag:
    """Return the lag of a consumer, as known without a read of the log."""
    rows = sum(
        max(0, at.high_watermark - max(consumer.offsets[bucket], at.first_offset))
        for bucket, at in table.positions().items()
        if bucket in consumer.offsets
    )
    known = table.consumers.written_us
    # A report reads the time of the first unread row. Without a time, the row is younger.
    times = [known.get(place, consumer.reported_us) for place in _places(table, consumer)]
    lag_ms = None if rows else 0
    if rows and times:
        lag_ms = max(0, now_us - min(times)) // 1_000
    return ConsumerLag(
        consumer=consumer,
        rows=rows,
        lag_ms=lag_ms,
        rows_at_risk=table.consumers.rows_at_risk.get(consumer.key, 0),
    )


def _places(table: OpenTable, consumer: Consumer) -> Iterable[tuple[int, int]]:
    """The first unread rows in the log, by bucket and offset."""
    for bucket, offset in consumer.offsets.items():
        if bucket < len(table.tablets):
            tablet = table.tablets[bucket]
            first = max(offset, tablet.log_start_offset)
            if first < tablet.high_watermark:
                yield bucket, first


def _read_times(
    table: OpenTable, places: Iterable[tuple[int, int]]
) -> Mapping[tuple[int, int], int]:
    times = {}
    for bucket, offset in places:
        try:
            times[bucket, offset] = table.tablets[bucket].read(offset, bytes_max=1)[0].timestamp_us
        except (StreamhouseError, IndexError) as error:
            # Retention took it meanwhile, or the log is damaged, which shows where it is read.
            _logger.debug("event=age_unknown table=%s why=%r", table.path, str(error))
    return times


# -- what retention asks and tells ---------------------------------------------------------------


def first_wanted(table: OpenTable, bucket: int) -> int | None:
    """Return the first offset of a bucket unread by some consumer; None without consumers."""
    offsets = [
        consumer.offsets[bucket] for consumer in table.readers() if bucket in consumer.offsets
    ]
    return min(offsets, default=None)


async def tell_of_rows_at_risk(table: OpenTable, runtime: Runtime) -> None:
    """Log each consumer with unread rows about to leave the log, once."""
    consumers = _dependent(table)
    at_risk: dict[ConsumerKey, int] = {}
    if consumers and not table.properties.log_consumers_wait:
        due = await _due_soon(table, runtime)
        for consumer in consumers:
            rows = sum(
                max(0, end - max(consumer.offsets[bucket], table.tablets[bucket].log_start_offset))
                for bucket, end in due.items()
                if bucket in consumer.offsets
            )
            if rows:
                at_risk[consumer.key] = rows
    for (_, name), rows in at_risk.items() - table.consumers.rows_at_risk.items():
        _logger.warning(
            "event=unread_rows_expire table=%s consumer=%s rows=%d"
            " advice='rows that it has not read leave the log soon: see why it is behind, or set"
            " table.log.ttl, or table.log.consumers.wait=true'",
            *(table.path, name, rows),
        )
    table.consumers.rows_at_risk = at_risk


async def _due_soon(table: OpenTable, runtime: Runtime) -> dict[int, int]:
    age_us = table.properties.log_ttl_ms * 1_000 * _WARN_PERCENT // 100
    before_us = runtime.clock_us() - age_us
    ends = await runtime.run(_logged_ends, table, before_us)
    return {
        bucket: min(end, await table.forgettable(bucket, timestamp_us_before=before_us))
        for bucket, end in ends.items()
    }


def _logged_ends(table: OpenTable, before_us: int) -> dict[int, int]:
    """Return the offset in each bucket below which the log's rows are older than a time."""
    return {b: tablet.offset_for_timestamp(before_us) for b, tablet in enumerate(table.tablets)}


def tell_of_lost_rows(table: OpenTable, bucket: int, *, start: int, end: int) -> int:
    """Log the consumers without the rows [start, end), which have left the log; count the rows."""
    lost = 0
    for consumer in _dependent(table):
        rows = end - max(start, consumer.offsets.get(bucket, end))
        if rows > 0:
            lost += rows
            _logger.warning(
                "event=unread_rows_expired table=%s bucket=%d consumer=%s rows=%d",
                *(table.path, bucket, consumer.name, rows),
            )
    return lost


def _dependent(table: OpenTable) -> list[Consumer]:
    """Return the consumers that read rows only from the log."""
    return [
        consumer
        for consumer in table.readers()
        if not (consumer.reads_lake and table.is_log_kept_in_lake)
    ]
