"""One table as it runs: its buckets' logs, its lake state and who waits for it.

Owned by the event loop: `info`, `lake` and `is_dropped` change only there, and high watermarks are
published only there, so what is read between two awaits is one consistent cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_writer import KeyWriter
from streamhouse.storage_service.engine.keys.row_reader import RowReader
from streamhouse.storage_service.engine.tiering_desk.lake_pins import LakePins
from streamhouse.storage_service.engine.wakeups import Wakeups
from streamhouse.storage_service.engine.write_gate import WriteGate
from streamhouse.storage_service.errors import BucketNotFoundError, HistoryDivergedError
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.model.lake import LakeState
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.properties import TableProperties
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["OpenTable"]


class OpenTable:
    """One table of this service."""

    def __init__(
        self,
        info: TableInfo,
        tablets: Sequence[LogTablet],
        *,
        lake: LakeState,
        lake_pins: LakePins,
        wakeups: Wakeups,
    ) -> None:
        assert len(tablets) == info.bucket_count, "every bucket has its log"
        self.info = info
        self.tablets = tuple(tablets)
        self.lake_pins = lake_pins
        self.wakeups = wakeups
        self.key_buckets: tuple[KeyBucket, ...] = ()
        """Of a primary key table, each bucket's log and rows."""
        self.key_writer: KeyWriter | None = None
        """Of a primary key table, what writes it."""
        self.row_reader: RowReader | None = None
        """Of a primary key table, what looks up one row; made when it is first asked."""
        self.gate = WriteGate()
        """Passed by every write."""
        self.keep_lake(lake)
        self.truncated_offsets: dict[int, int] = {}
        """Of a log table that was overwritten, where the rows of each bucket begin."""
        self.truncated_at_us = 0
        """When it was."""
        self.is_dropped = False
        self.read_rows = 0
        """How many rows were sent to readers since the service started."""
        self._properties = (info, info.properties())
        self._log_schemas: dict[int, pa.Schema] = {}
        self._next_spread_bucket = 0
        # bucket -> (first offset that is not tiered, its timestamp)
        self._untiered_since: dict[int, tuple[int, int]] = {}

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.info.path

    @property
    def properties(self) -> TableProperties:
        """The table's properties, parsed once."""
        parsed_of, properties = self._properties
        if parsed_of is not self.info:
            properties = self.info.properties()
            self._properties = (self.info, properties)
        return properties

    def keep_lake(self, lake: LakeState) -> None:
        """Go on with a lake state that is durable; one that has diverged ends all writes."""
        self.lake = lake
        if lake.diverged:
            self.gate.stop(HistoryDivergedError(lake.diverged))
        else:
            self.gate.resume()

    def tablet(self, bucket: int) -> LogTablet:
        """Return the log of `bucket`; raises `BucketNotFoundError` naming the valid ones."""
        if not 0 <= bucket < len(self.tablets):
            raise BucketNotFoundError(
                f"table '{self.path}' has no bucket {bucket}; its buckets are"
                f" 0..{len(self.tablets) - 1}"
            )
        return self.tablets[bucket]

    def positions(self) -> dict[int, BucketPositions]:
        """Return where every bucket stands: one consistent cut."""
        tiered = self.lake.tiered_offsets
        return {
            bucket: BucketPositions(
                log_start_offset=tablet.log_start_offset,
                high_watermark=tablet.high_watermark,
                tiered_offset=tiered.get(bucket, 0),
                truncated_offset=self.truncated_offsets.get(bucket, 0),
                expired_offset=self.lake.expired_offsets.get(bucket, 0),
            )
            for bucket, tablet in enumerate(self.tablets)
        }

    def truncate(self, offsets: Mapping[int, int], *, timestamp_us: int) -> None:
        """End the life of all rows below `offsets`; in one step with what replaces them."""
        for bucket, offset in offsets.items():
            self.tablets[bucket].truncate(offset)
            self.truncated_offsets[bucket] = max(self.truncated_offsets.get(bucket, 0), offset)
        self.truncated_at_us = max(self.truncated_at_us, timestamp_us)

    @property
    def is_truncation_pending(self) -> bool:
        """Whether the lake has rows that were overwritten."""
        is_known = self.lake.truncated_offsets == self.truncated_offsets
        return self.lake.snapshot_id is not None and not is_known

    def state(self) -> TableState:
        """Return the table, its positions and its lake snapshot: one consistent cut."""
        return TableState(table=self.info, positions=self.positions(), lake=self.lake)

    def offsets_for_timestamp(self, timestamp_us: int) -> dict[int, int]:
        """Return per bucket the first offset of a time, else the watermark. On any thread."""
        return {
            bucket: tablet.offset_for_timestamp(timestamp_us)
            for bucket, tablet in enumerate(self.tablets)
        }

    def next_spread_bucket(self, count: int) -> int:
        """Return the bucket at which spreading `count` parts starts, going round."""
        bucket = self._next_spread_bucket
        self._next_spread_bucket = (bucket + count) % len(self.tablets)
        return bucket

    def oldest_untiered_us(self) -> int | None:
        """Return when the oldest change that the lake does not have was made; None if it has all.

        As `untiered_since_us`; an overwrite is a change, too.
        """
        times = [*self.untiered_since_us().values()]
        if self.is_truncation_pending:
            times.append(self.truncated_at_us)
        return min(times, default=None)

    def untiered_since_us(self) -> dict[int, int]:
        """Return bucket -> when its oldest row that the lake does not have was written.

        Reads one batch a bucket, on any thread, and each batch only once: call it off the event
        loop unless `is_age_known`.
        """
        times = {}
        for bucket, offset in self._first_untiered():
            known_offset, timestamp_us = self._untiered_since.get(bucket, (-1, 0))
            if known_offset != offset:
                timestamp_us = self.tablets[bucket].read(offset, bytes_max=1)[0].timestamp_us
                self._untiered_since[bucket] = (offset, timestamp_us)
            times[bucket] = timestamp_us
        return times

    @property
    def known_untiered_since_us(self) -> int | None:
        """As `oldest_untiered_us`, of the rows whose age was read before: nothing is read."""
        known = (
            (offset, *self._untiered_since.get(bucket, (-1, 0)))
            for bucket, offset in self._first_untiered()
        )
        return min((time for offset, first, time in known if first == offset), default=None)

    @property
    def is_age_known(self) -> bool:
        """Whether `oldest_untiered_us` has nothing to read."""
        return all(
            self._untiered_since.get(bucket, (-1, 0))[0] == offset
            for bucket, offset in self._first_untiered()
        )

    def _first_untiered(self) -> list[tuple[int, int]]:
        """(bucket, first offset outside the lake) of the buckets that have one."""
        return [
            (bucket, offset)
            for bucket, tablet in enumerate(self.tablets)
            # Retention takes rows that are not tiered only while the lake is switched off.
            if (offset := max(self.lake.tiered_offsets.get(bucket, 0), tablet.log_start_offset))
            < tablet.high_watermark
        ]

    @property
    def lacks_batch_rows(self) -> bool:
        """Whether the table has a batch layout, and that has other rows than are visible."""
        if not self.info.properties().has_batch_layout:
            return False
        batch = self.lake.batch
        if batch is not None and batch.truncated_offsets != self.truncated_offsets:
            return True
        ends = {} if batch is None else batch.tiered_offsets
        starts = self.truncated_offsets
        return any(
            t.high_watermark > max(ends.get(b, 0), starts.get(b, 0))
            for b, t in enumerate(self.tablets)
        )

    def log_schema_of(self, schema_id: int) -> pa.Schema:
        """Return the Arrow schema of log rows in this version of the table's schema."""
        schema = self._log_schemas.get(schema_id)
        if schema is None:
            # Made for every fetch it would cost more than a small fetch.
            schema = self._log_schemas[schema_id] = self.info.log_schema_of(schema_id)
        return schema

    @property
    def row_count(self) -> int:
        """Rows by key of a primary key table; of a log table those that a read finds.

        That is, all that were neither overwritten nor have expired.
        """
        if self.key_buckets:
            return sum(bucket.row_count for bucket in self.key_buckets)
        return sum(at.high_watermark - at.first_offset for at in self.positions().values())

    @property
    def untiered_rows(self) -> int:
        """Visible rows that the lake does not have."""
        return sum(
            at.high_watermark - max(at.tiered_offset, at.truncated_offset)
            for at in self.positions().values()
        )
