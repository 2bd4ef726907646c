"""A storage service in memory, as tiering and reads see it: logs, positions, claims, lake state.

It keeps the promises of the real one that they rely on: offsets are dense, an epoch is handed
out once, a stale epoch is refused, tiered offsets never go back. Time stands still unless told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from streamhouse.client import LogBatch, PositionReports, TieringIdle
from streamhouse.core.errors import (
    FencedError,
    HistoryDivergedError,
    InvalidRequestError,
    LogCutError,
    OffsetOutOfRangeError,
    TableNotFoundError,
)
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import (
    LakeCatalog,
    LakeDebt,
    LakeState,
)
from streamhouse.core.model.offsets import BucketPositions, further
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.table_state import (
    TableState,
    TieringAssignment,
    TieringReport,
)
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.guards.lake_look import readable_head
from streamhouse.lake.guards.served_tables import ServedTable

__all__ = ["FakeService"]

LEASE_MS = 60_000


@dataclass
class _FakeTable:
    info: TableInfo
    lake: LakeState
    batches: dict[int, list[LogBatch]]
    log_starts: dict[int, int]
    holder: str = ""
    failures: list[str] = field(default_factory=list)
    completions: int = 0
    pins: dict[str, int] = field(default_factory=dict)
    debt: LakeDebt | None = None
    truncated: dict[int, int] = field(default_factory=dict)

    def fingerprint(self, bucket: int, offset: int) -> str:
        """The rows below an offset, in 16 digits."""
        below = [
            (batch.base_offset, batch.timestamp_us)
            for batch in self.batches[bucket]
            if batch.base_offset < offset
        ]
        return blake2b(repr((bucket, offset, below)).encode(), digest_size=8).hexdigest()


class FakeService:
    """Has the calls of `StorageClient` that tiering and reads need; `with` closes nothing.

    `on_read` stands between the pages of a bucket and who reads them. `on_claim` is called before a
    claim, and may answer in its place. Both may raise. `reads`, `states` and the like count calls.
    """

    def __init__(self, catalog: LakeCatalog) -> None:
        self.endpoint = "memory:"
        self.heartbeats = 0
        self.reads = 0
        self.questions = 0
        self.states = 0
        self.may_lose_rows = False
        """Whether it says so, and tells fingerprints; `lose` makes them others from there on."""
        self.latest_transactions: list[dict[str, Any]] = []
        """What it says of any table's, newest first."""
        self.consumers_said: dict[tuple[str, str], tuple[dict[int, int], bool]] = {}
        """By table and consumer, what it reported last, and whether it reads the lake."""
        self._lost_from: int | None = None
        self.on_read: Callable[[int, Iterator[LogBatch]], Iterator[LogBatch]] | None = None
        self.on_claim: Callable[[], TieringAssignment | TieringIdle | None] | None = None
        self._catalog = catalog
        self._tables: dict[str, _FakeTable] = {}
        self._next_table_id = 1
        self._now_us = 1_700_000_000_000_000
        self._lock = threading.RLock()

    def __enter__(self) -> FakeService:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    # -- what a test does to it ----------------------------------------------------------------

    def create_table(self, descriptor: TableDescriptor) -> TableInfo:
        info = TableInfo(
            descriptor=descriptor, table_id=self._next_table_id, created_at_us=self._now_us
        )
        self._next_table_id += 1
        buckets = range(descriptor.bucket_count)
        self._tables[str(descriptor.path)] = _FakeTable(
            info=info,
            lake=LakeState(tiered_offsets=dict.fromkeys(buckets, 0)),
            batches={bucket: [] for bucket in buckets},
            log_starts=dict.fromkeys(buckets, 0),
        )
        return info

    def drop_table(self, path: str) -> None:
        del self._tables[path]

    def append(self, path: str, bucket: int, rows: pa.RecordBatch) -> None:
        """Append rows of a log table, or changes of a primary key table as its log has them."""
        table = self._table(path)
        log = table.batches[bucket]
        self._now_us += 1_000
        log.append(
            LogBatch(
                bucket=bucket,
                base_offset=log[-1].end_offset if log else 0,
                timestamp_us=self._now_us,
                data=rows
                if table.info.is_primary_key_table
                else conform(rows, table.info.schema, table=path),
            )
        )

    @property
    def now_ms(self) -> int:
        return self._now_us // 1_000

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        self._now_us += int(seconds * 1_000_000)

    def overwrite(self, path: str) -> None:
        """End the life of all rows there are, as an overwrite of a log table does."""
        table = self._table(path)
        for bucket, log in table.batches.items():
            if log:
                table.truncated[bucket] = table.log_starts[bucket] = log[-1].end_offset

    def change_layout(self, path: str, layout: Mapping[str, str]) -> TableInfo:
        """Give the table this batch layout, or none, as changed properties do."""
        table = self._table(path)
        descriptor = table.info.descriptor
        kept = {k: v for k, v in descriptor.properties.items() if ".batch-layout." not in k}
        descriptor = replace(descriptor, properties={**kept, **layout})
        if descriptor.batch_layout() != table.info.descriptor.batch_layout():
            since = table.lake.tiering_epoch
            table.lake = replace(table.lake, batch=None, batch_since_epoch=since)
        table.info = replace(table.info, descriptor=descriptor)
        return table.info

    def expire_log(self, path: str, bucket: int, before: int) -> None:
        table = self._table(path)
        table.log_starts[bucket] = max(before, table.truncated.get(bucket, 0))

    def release(self, path: str) -> None:
        """End the lease of a dead worker."""
        self._table(path).holder = ""

    def clear_pins(self, path: str) -> None:
        """Forget the pins, as when their time is over."""
        self._table(path).pins.clear()

    def set_lake(self, path: str, lake: LakeState) -> None:
        self._table(path).lake = lake

    def failures(self, path: str) -> list[str]:
        return self._table(path).failures

    def completions(self, path: str) -> int:
        return self._table(path).completions

    def debt(self, path: str) -> LakeDebt | None:
        """Return what the lake table is made of, as reported last."""
        return self._table(path).debt

    # -- what tiering and reads ask --------------------------------------------------------------

    def lake_catalog(self) -> LakeCatalog:
        return self._catalog

    def transactions(self, path: str, *, limit: int = 1000) -> list[dict[str, Any]]:
        return self.latest_transactions[:limit]

    def endpoint_of(self, path: str) -> str:
        return self.endpoint

    def list_tables(self, database: str | None = None) -> list[str]:
        return sorted(self._tables)

    def describe_table(self, path: str) -> TableInfo:
        return self._table(path).info

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        self.states += 1
        table = self._table(path)
        return TableState(
            may_lose_rows=self.may_lose_rows,
            table=table.info,
            positions={
                bucket: BucketPositions(
                    log_start_offset=table.log_starts[bucket],
                    high_watermark=log[-1].end_offset if log else 0,
                    tiered_offset=table.lake.tiered_offsets[bucket],
                    truncated_offset=table.truncated.get(bucket, 0),
                    expired_offset=table.lake.expired_offsets.get(bucket, 0),
                )
                for bucket, log in table.batches.items()
            },
            lake=table.lake,
        )

    def positions(self, path: str) -> dict[int, BucketPositions]:
        return dict(self.table_state(path).positions)

    def offsets_for_timestamp(
        self,
        path: str,
        timestamp_us: int,
        *,
        start: Mapping[int, int] | None = None,
        skip_lost: bool = False,
        table_id: int | None = None,
    ) -> dict[int, int]:
        """As the service: in log and lake, and refused where rows of the time are in neither."""
        table = self._table(path)
        table.info.check_positions(start or {}, table_id=table_id)
        state = self.table_state(path)
        offsets = {}
        for bucket, at in state.positions.items():
            if start is not None and bucket not in start:
                continue
            lake_end = at.tiered_offset
            if state.table.is_primary_key_table:
                history = state.lake.changelog
                lake_end = 0 if history is None else history.tiered_offsets[bucket]
            is_whole = lake_end >= at.log_start_offset
            first = max(at.first_offset, (start or {}).get(bucket, 0))
            late = [
                max(batch.base_offset, first)
                for batch in table.batches[bucket]
                if batch.timestamp_us >= timestamp_us and batch.end_offset > first
            ]
            offset = min(late, default=at.high_watermark)
            if not is_whole and offset < at.log_start_offset:
                if not skip_lost:
                    raise OffsetOutOfRangeError(
                        f"table '{path}', bucket {bucket}: rows [{offset}, {at.log_start_offset})"
                        " have left the log and are not in the lake"
                    )
                offset = at.log_start_offset
            offsets[bucket] = offset
        return offsets

    def claim_tiering(
        self,
        worker_id: str,
        *,
        tables: Sequence[str] | None = None,
        force: bool = False,
        include_idle: bool = False,
    ) -> TieringAssignment | TieringIdle:
        answer = None if self.on_claim is None else self.on_claim()
        if answer is not None:
            return answer
        with self._lock:
            reason = "no_tables"
            for path in sorted(self._tables) if tables is None else tables:
                table = self._table(path)
                state = self.table_state(path)
                reached = state.reached_offsets()
                is_idle = all(p.high_watermark == reached[b] for b, p in state.positions.items())
                is_idle &= not state.has_overwritten_rows
                if is_idle and not include_idle:
                    reason = "nothing_to_tier"
                elif table.holder:
                    reason = "leased"
                else:
                    table.holder = worker_id
                    table.lake = replace(table.lake, tiering_epoch=table.lake.tiering_epoch + 1)
                    return TieringAssignment(
                        epoch=table.lake.tiering_epoch,
                        lease_ms=LEASE_MS,
                        state=self.table_state(path),
                    )
            return TieringIdle(reason=reason, retry_after_ms=50)

    def heartbeat_tiering(
        self,
        path: str,
        *,
        table_id: int,
        epoch: int,
        step: str = "",
        rows_done: int = 0,
        rows_planned: int = 0,
    ) -> None:
        with self._lock:
            self.heartbeats += 1
            self._check_claim(self._table(path), table_id=table_id, epoch=epoch)

    def compare_history(
        self,
        path: str,
        *,
        table_id: int,
        covered: CoveredOffsets | None = None,
        offsets: Mapping[int, int] | None = None,
    ) -> dict[int, str]:
        with self._lock:
            table = self._table(path)
            if covered is not None:
                own = {b: table.fingerprint(b, end) for b, end in covered.tiered_offsets.items()}
                if any(own[bucket] != said for bucket, said in covered.fingerprints.items()):
                    raise HistoryDivergedError(f"table '{path}' has other rows")
                epoch = max(table.lake.tiering_epoch, covered.epoch)
                table.lake = replace(table.lake, tiering_epoch=epoch)
            return {b: table.fingerprint(b, offset) for b, offset in (offsets or {}).items()}

    def check_lake_history(self, path: str, covered: CoveredOffsets, *, table_id: int) -> None:
        self.questions += 1
        self.compare_history(path, table_id=table_id, covered=covered)

    def look_at_lake(self, path: str) -> LakeState:
        state = self.table_state(path)
        live = ServedTable(
            info=state.table,
            lake=state.lake,
            positions=state.positions,
        )
        catalog = open_catalog(self._catalog)
        try:
            head = readable_head(catalog, live)
        finally:
            catalog.close()
        if head is not None:
            self.set_lake(path, replace(state.lake, snapshot_id=head))
        return self.table_state(path).lake

    def complete_tiering(self, path: str, report: TieringReport) -> LakeState:
        with self._lock:
            table, epoch, ends = self._table(path), report.epoch, report.tiered_offsets
            own = self.compare_history(
                path,
                table_id=report.table_id,
                covered=CoveredOffsets(
                    tiered_offsets=ends, epoch=epoch, fingerprints=report.fingerprints
                ),
                offsets=ends,
            )
            self._check_claim(table, table_id=report.table_id, epoch=epoch)
            for bucket, position in self.table_state(path).positions.items():
                if not position.tiered_offset <= ends[bucket] <= position.high_watermark:
                    raise InvalidRequestError(f"bucket {bucket}: {ends[bucket]}")
            lake = table.lake
            batch = None if epoch <= lake.batch_since_epoch else report.batch
            table.lake = replace(
                lake,
                snapshot_id=report.snapshot_id,
                table_uuid=report.table_uuid,
                tiering_epoch=epoch,
                tiered_offsets=dict(ends),
                tiered_at_us=self._now_us,
                changelog=report.changelog or lake.changelog,
                batch=batch or lake.batch,
                batch_tiered_at_us=lake.batch_tiered_at_us if batch is None else self._now_us,
                truncated_offsets=lake.truncated_offsets
                if report.truncated_offsets is None
                else report.truncated_offsets,
                maintenance_due_us=lake.maintenance_due_us
                if report.keep_lease
                else report.maintenance_due_us,
                expired_offsets=further(lake.expired_offsets, report.expired_offsets),
                expired_at_us=max(lake.expired_at_us, report.expired_at_us),
                fingerprints=own,
            )
            for bucket, end in table.lake.expired_offsets.items():
                assert end <= ends[bucket]
            table.debt = report.debt.completed_by(table.debt) if report.debt else table.debt
            if not report.keep_lease:
                table.holder = ""
            table.completions += 1
            return table.lake

    def fail_tiering(self, path: str, *, table_id: int, epoch: int, error: str) -> None:
        with self._lock:
            table = self._table(path)
            self._check_claim(table, table_id=table_id, epoch=epoch)
            table.failures.append(error)
            table.holder = ""

    def pin_snapshot(self, path: str, snapshot_id: int, *, holder: str, ttl_s: float = 60) -> None:
        self._table(path).pins[holder] = snapshot_id

    def unpin_snapshot(self, path: str, *, holder: str) -> None:
        self._table(path).pins.pop(holder, None)

    def position_reports(
        self, path: str, consumer: str, *, reads_lake: bool = False
    ) -> PositionReports:
        def send(offsets: Mapping[int, int]) -> dict[str, int | None]:
            self.consumers_said[path, consumer] = (dict(offsets), reads_lake)
            high = {b: at.high_watermark for b, at in self.table_state(path).positions.items()}
            rows = sum(max(0, high[b] - offset) for b, offset in offsets.items())
            return {"lag_rows": rows, "lag_ms": 1_000 * rows}

        return PositionReports(send, consumer=consumer)

    def pinned_snapshots(self, path: str) -> dict[str, int]:
        return dict(self._table(path).pins)

    def lose(self, offset: int) -> None:
        """Have other rows than before from an offset on, in every bucket."""
        self._lost_from = offset

    def fingerprint_at(
        self,
        path: str,
        bucket: int,
        offset: int,
        *,
        table_id: int,
        expected: str | None = None,
    ) -> str | None:
        """As `StorageClient.fingerprint_at`."""
        self._table(path).info.check_positions({bucket: offset}, table_id=table_id)
        is_other = self._lost_from is not None and offset > self._lost_from
        found = f"{'other' if is_other else 'first'}-{bucket}-{offset}"
        if expected not in (None, found):
            raise LogCutError(f"table '{path}', bucket {bucket}: rows below {offset} were lost")
        return found if self.may_lose_rows else None

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = 0,
        schema_id: int | None = None,
        table_id: int | None = None,
    ) -> Iterator[LogBatch]:
        assert not schema_id, "the fake's tables never change their schema"
        pages = self._pages(path, bucket, start, end, columns, table_id)
        return pages if self.on_read is None else self.on_read(bucket, pages)

    def _pages(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        columns: Sequence[str] | None,
        table_id: int | None,
    ) -> Iterator[LogBatch]:
        self.reads += 1
        table = self._table(path)
        table.info.check_positions({bucket: end}, table_id=table_id)
        at = self.positions(path)[bucket]
        if not at.log_start_offset <= start <= end <= at.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {start} of bucket {bucket} is outside [{at.log_start_offset},"
                f" {at.high_watermark}]"
            )
        for batch in list(table.batches[bucket]):
            first, last = max(start, batch.base_offset), min(end, batch.end_offset)
            if first < last:
                rows = batch.data if columns is None else batch.data.select(list(columns))
                data = rows.slice(first - batch.base_offset, last - first)
                yield replace(batch, base_offset=first, data=data)

    def _table(self, path: str) -> _FakeTable:
        try:
            return self._tables[str(TablePath.parse(path))]
        except KeyError:
            raise TableNotFoundError(f"table '{path}' does not exist") from None

    def _check_claim(self, table: _FakeTable, *, table_id: int, epoch: int) -> None:
        if table_id != table.info.table_id:
            path = table.info.path
            raise TableNotFoundError(f"table '{path}' with id {table_id} does not exist")
        if epoch != table.lake.tiering_epoch:
            raise FencedError(
                f"tiering epoch {epoch} is not the current one, {table.lake.tiering_epoch}"
            )
