"""Log tables whose rows age: what may be missing, and what may not, of all that was written.

At every look there is one expired offset in each bucket, registered with the service. Rows below it
are gone from every read; rows at or above it are all there, in both layouts. It never goes back,
and no row below it is younger than the table's time to live by the service's own timestamps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table_state import TableState
from tests.support.tier_once import tier_once
from tests.support.union_world import read_layouts
from tests.torture.checkers import lake_table
from tests.torture.ledger import AppendLedger, RowId
from tests.torture.writers import LOG_SCHEMA

__all__ = [
    "AgingChecker",
    "TableAges",
    "age_out",
    "check_layouts",
    "differs",
    "lake_rows",
    "read_cut",
]

ADDRESSED: Final = ("writer", "number", "__bucket", "__offset", "__timestamp")
_ATTEMPTS: Final = 10
_GONE_WAIT_S: Final = 60.0
# Of the writer that checkers are: rows that come after all others have gone.
_LATE_WRITER: Final = 1_000
_LATE_ROWS: Final = 50


class SeenRow(NamedTuple):
    """A row as it was read, with the service's time of it in microseconds since 1970."""

    row: RowId
    timestamp_us: int


class TableAges:
    """Everything ever read of a table whose rows age, and where its rows began at each look.

    `buckets`: bucket -> offset -> row, without those that had gone before anybody looked. `places`:
    row -> bucket and offset; nothing with `has_copies`, if rows have no names of their own.
    """

    def __init__(self, table: str, ttl_us: int, *, has_copies: bool = False) -> None:
        self.table = table
        self.ttl_us = ttl_us
        self.has_copies = has_copies
        self.buckets: dict[int, dict[int, SeenRow]] = {}
        self.places: dict[RowId, tuple[int, int]] = {}
        self.expired: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._log_ends: dict[int, int] = {}

    def look(self, client: StreamhouseClient) -> TableState:
        """Take a cut and judge where its rows begin; every row of the log is read on to it."""
        state = client.table_state(self.table)
        looked_us = now_us()
        for bucket, at in state.positions.items():
            where = f"{self.table}, bucket {bucket}"
            end = self._ends.get(bucket, 0)
            assert at.high_watermark >= end, (
                f"{where}: offset {end} was visible, but it ends at {at.high_watermark}"
            )
            self._read_log(client, bucket, at.log_start_offset, at.high_watermark)
            before = self.expired.get(bucket, 0)
            assert before <= at.expired_offset <= at.tiered_offset, (
                f"{where}: rows below {before} had expired, now it is those below"
                f" {at.expired_offset}, tiered are those below {at.tiered_offset}"
            )
            self._check_old(bucket, range(before, at.expired_offset), looked_us)
            self.expired[bucket], self._ends[bucket] = at.expired_offset, at.high_watermark
        return state

    def add(self, bucket: int, offset: int, seen: SeenRow) -> None:
        """Note a row that was found. What was found once never changes."""
        where = f"{self.table}, bucket {bucket}, offset {offset}"
        known = self.buckets.setdefault(bucket, {}).setdefault(offset, seen)
        assert known == seen, f"{where}: {known} has become {seen}"
        if not self.has_copies:
            place = self.places.setdefault(seen.row, (bucket, offset))
            assert place == (bucket, offset), f"{where}: {seen.row} is at {place} too"

    def add_all(self, rows: pa.Table) -> dict[int, list[int]]:
        """Note rows read with their addresses; return bucket -> their offsets, in order."""
        found: dict[int, list[int]] = {}
        for bucket, offset, seen in _addressed(rows):
            self.add(bucket, offset, seen)
            found.setdefault(bucket, []).append(offset)
        return {bucket: sorted(offsets) for bucket, offsets in found.items()}

    def is_expired(self, bucket: int, offset: int) -> bool:
        """Whether the row there had gone at the last look."""
        return offset < self.expired.get(bucket, 0)

    @property
    def unseen(self) -> int:
        """How many rows had gone before anybody looked."""
        return sum(
            end - sum(offset < end for offset in self.buckets.get(bucket, ()))
            for bucket, end in self.expired.items()
        )

    @property
    def newest_us(self) -> int:
        """When the newest row was written that was ever seen; 0 before the first."""
        seen = (row.timestamp_us for rows in self.buckets.values() for row in rows.values())
        return max(seen, default=0)

    def _read_log(self, client: StreamhouseClient, bucket: int, start: int, end: int) -> None:
        start = max(start, self._log_ends.get(bucket, 0))
        columns = ["writer", "number"]
        try:
            for batch in client.read_range(self.table, bucket, start, end, columns=columns):
                pairs = zip(*(batch.data.column(n).to_pylist() for n in columns), strict=True)
                for offset, row in enumerate(pairs, batch.base_offset):
                    self.add(bucket, offset, SeenRow(row, batch.timestamp_us))
        except OffsetOutOfRangeError:
            # Retention was faster; what has not expired is in the lake.
            return
        self._log_ends[bucket] = end

    def _check_old(self, bucket: int, offsets: Iterable[int], looked_us: int) -> None:
        """No row is missing that was younger than the time to live when it was missed."""
        rows = self.buckets.get(bucket, {})
        for offset in offsets:
            seen = rows.get(offset)
            assert seen is None or seen.timestamp_us + self.ttl_us <= looked_us, (
                f"{self.table}, bucket {bucket}, offset {offset}: {seen.row} has gone at the age of"
                f" {looked_us - seen.timestamp_us} us"
            )


class AgingChecker:
    """A log table with a time to live that is only appended to."""

    def __init__(self, table: str, ledger: AppendLedger, ttl_ms: int) -> None:
        self.table = table
        self.ledger = ledger
        self.ages = TableAges(table, ttl_ms * 1000)
        self._missed: set[RowId] = set()

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge the rows there are, and what has become of the others; return how many there are.

        Every row that was acknowledged has been seen at its place, or was old when it was missed.
        """
        acknowledged = self.ledger.take_acknowledged()
        judged = self.check_cut(client)
        missed_us = now_us()
        for row, (bucket, offset) in acknowledged.items():
            place = self.ages.places.get(row)
            if place is not None:
                assert bucket < 0 or place == (bucket, offset), (
                    f"{self.table}: {row} is at {place}, but was acknowledged at {bucket, offset}"
                )
                continue
            age_us = missed_us - self.ledger.sent_us(row)
            assert age_us >= self.ages.ttl_us, (
                f"{self.table}: {row} was acknowledged, but it is not there at the age of {age_us}"
                " us at most"
            )
            assert bucket < 0 or self.ages.is_expired(bucket, offset), (
                f"{self.table}, bucket {bucket}, offset {offset}: {row} was acknowledged there, but"
                " is lost, and rows of this offset have not expired"
            )
            self._missed.add(row)
        invented = self.ledger.unsent(self.ages.places)
        assert not invented, f"{self.table}: rows nobody sent: {invented[:5]}"
        if is_quiet:
            self._check_quiet(client)
        return judged

    def check_cut(self, client: StreamhouseClient) -> int:
        """Both layouts have every row of a cut from its expired offsets on; return how many."""
        cut = read_cut(self.ages, client)
        assert cut is not None, f"{self.table}: it could not be read {_ATTEMPTS} times"
        return check_layouts(self.ages, *cut)

    def _check_quiet(self, client: StreamhouseClient) -> None:
        """Nobody writes: every way to read has the same rows, but for what goes meanwhile."""
        self._missed -= self.ages.places.keys()
        unseen = self.ages.unseen
        assert len(self._missed) <= unseen, (
            f"{self.table}: {len(self._missed)} acknowledged rows were never seen, but only"
            f" {unseen} had gone before anybody looked: {sorted(self._missed)[:5]}"
        )
        self._check_order()
        before = self.ages.look(client)
        columns = ADDRESSED[:2]
        reads = {
            "union": client.read(self.table, columns=columns, includeMetadata=True),
            # The planner takes the batch layout if that is less to read.
            "filtered": client.read(
                self.table, columns=columns, where="number >= 0", includeMetadata=True
            ),
        }
        if before.lake.snapshot_id is not None:
            lake = f"{self.table}$lake"
            reads["$lake"] = client.read(lake, columns=columns, includeMetadata=True)
        after = self.ages.look(client)
        for name, rows in reads.items():
            found = self.ages.add_all(rows)
            for bucket, at in before.positions.items():
                least = at.tiered_offset if name == "$lake" else at.high_watermark
                self._check_between(
                    f"{self.table}, bucket {bucket}, {name} read",
                    found.get(bucket, []),
                    (at.expired_offset, after.positions[bucket].expired_offset),
                    least,
                )

    @staticmethod
    def _check_between(where: str, offsets: list[int], begins: tuple[int, int], end: int) -> None:
        """A read has all rows from an expired offset between these two on, at least up to `end`."""
        earliest, latest = begins
        if not offsets:
            assert end <= latest, f"{where}: it found nothing, but rows from {latest} on are there"
            return
        wanted = range(offsets[0], max(end, offsets[-1] + 1))
        assert offsets == list(wanted), differs(where, offsets, wanted)
        assert earliest <= offsets[0] <= latest, (
            f"{where}: it begins at offset {offsets[0]}, but rows below {earliest} have expired,"
            f" and none from {latest} on"
        )

    def _check_order(self) -> None:
        for bucket, rows in self.ages.buckets.items():
            last: dict[int, int] = {}
            for offset in sorted(rows):
                writer, number = rows[offset].row
                assert number > last.get(writer, -1), (
                    f"{self.table}, bucket {bucket}, offset {offset}: row {number} of writer"
                    f" {writer} comes after {last[writer]}"
                )
                last[writer] = number

    def check_lake(self, client: StreamhouseClient) -> None:
        """Every lake table has all rows from the expired offsets on, and none that is another."""
        for where, rows, ends in lake_rows(client, self.table):
            offsets: dict[int, list[int]] = {}
            for bucket, offset, seen in _addressed(rows):
                self.ages.add(bucket, offset, seen)
                offsets.setdefault(bucket, []).append(offset)
            self.ages.look(client)
            for bucket, end in ends.items():
                begin = self.ages.expired[bucket]
                found = sorted(o for o in offsets.get(bucket, []) if begin <= o < end)
                assert found == list(range(begin, end)), differs(
                    f"{where}, bucket {bucket}", found, range(begin, end)
                )

    def check_at_end(self, client: StreamhouseClient) -> None:
        """All rows leave in the end, and those that come after them are there."""
        self.check_lake(client)
        age_out(client, self.table, self.ages)
        late = [(_LATE_WRITER, number) for number in range(_LATE_ROWS)]
        self.ledger.sending(late)
        columns = {
            "writer": [writer for writer, _ in late],
            "number": [number for _, number in late],
            "text": [""] * len(late),
        }
        client.append(self.table, pa.table(columns, schema=LOG_SCHEMA))
        self.ledger.stored(dict.fromkeys(late, (-1, -1)))
        self.check(client, is_quiet=False)
        tier_once(client, self.table)
        self.check(client, is_quiet=True)

    @property
    def rows_aged(self) -> int:
        """How many rows have gone."""
        return sum(self.ages.expired.values())


def now_us() -> int:
    """Return the time by the clock that the service and its workers go by."""
    return time.time_ns() // 1000


def read_cut(
    ages: TableAges, client: StreamhouseClient
) -> tuple[TableState, list[pa.Table]] | None:
    """Return a cut, judged, and its rows in each layout of the table.

    None if each time a round or an overwrite came between the cut and the read.
    """
    for _ in range(_ATTEMPTS):
        state = ages.look(client)
        with contextlib.suppress(OffsetOutOfRangeError, SnapshotNotFoundError):
            return state, read_layouts(StorageClient.of(client), state, columns="writer,number")
    return None


def check_layouts(ages: TableAges, state: TableState, layouts: list[pa.Table]) -> int:
    """Each layout has every row of a cut from where it begins on, once; return how many."""
    for name, rows in zip(("rows' own", "batch"), layouts, strict=False):
        found = ages.add_all(rows)
        for bucket, at in state.positions.items():
            wanted = range(at.first_offset, at.high_watermark)
            offsets = found.get(bucket, [])
            where = f"{ages.table}, bucket {bucket}, {name} layout"
            assert offsets == list(wanted), differs(where, offsets, wanted)
    return sum(at.high_watermark - at.first_offset for at in state.positions.values())


def lake_rows(
    client: StreamhouseClient, table: str
) -> Iterator[tuple[str, pa.Table, dict[int, int]]]:
    """Yield each lake table that has a table's rows: its name, its rows, and up to where it has."""
    state = client.table_state(table)
    known = {LakeRole.ROWS: state.lake if state.lake.snapshot_id is not None else None}
    if state.table.properties().has_batch_layout:
        known[LakeRole.BATCH] = state.lake.batch
    for role, lake in known.items():
        name = role.lake_name(table)
        if lake is None:
            needs = [b for b, at in state.positions.items() if at.first_offset < at.high_watermark]
            assert not needs, f"{name}: there is no such lake table, but buckets {needs} have rows"
            continue
        rows = lake_table(client, name).scan(selected_fields=ADDRESSED).to_arrow()
        yield name, rows, dict(lake.tiered_offsets)


def age_out(client: StreamhouseClient, table: str, ages: TableAges) -> None:
    """Wait until every row is old, and see them all go, from every lake table."""
    from streamhouse.tiering.worker.maintain_job import maintain_table
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    deadline_s = time.monotonic() + _GONE_WAIT_S
    pause = threading.Event()
    while True:
        left = sum(at.high_watermark - at.first_offset for at in client.positions(table).values())
        if not left and not any(rows.num_rows for _, rows, _ in lake_rows(client, table)):
            break
        assert time.monotonic() < deadline_s, f"{table}: {left} rows are old, and do not leave"
        pause.wait(max(0.05, (ages.newest_us + ages.ttl_us - now_us()) / 1e6))
        try:
            for _ in maintain_table(
                StorageClient.of(client), client.lake_catalog(), ThreadRunner(1), table
            ):
                pass
        except UnavailableError:
            # A worker that was killed may still have the table.
            continue
    ages.look(client)


def _addressed(rows: pa.Table) -> Iterator[tuple[int, int, SeenRow]]:
    """Yield bucket, offset and row of rows that were read with their addresses."""
    times = rows.column("__timestamp").cast(pa.int64())
    columns = (rows.column(name).to_pylist() for name in ADDRESSED[:-1])
    for writer, number, bucket, offset, timestamp_us in zip(
        *columns, times.to_pylist(), strict=True
    ):
        yield bucket, offset, SeenRow((writer, number), timestamp_us)


def differs(where: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    """Say in one sentence how the offsets that were found are not the wanted ones."""
    has, must = set(found), set(wanted)
    twice = len(found) - len(has)
    return (
        f"{where}: {len(must - has)} rows are missing, from offset"
        f" {min(must - has, default=None)}, {len(has - must)} are too many, from offset"
        f" {min(has - must, default=None)}, {twice} are there twice"
    )
