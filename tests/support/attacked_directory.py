"""A small data directory with everything in it, and what was acknowledged of it.

`build` makes the directory and says what a service promised about it: `Acknowledged`, which is
plain data and can be stored as JSON. `attacks.attack` damages a copy. `judge` opens the copy and
says of every table whether it is right or refused with a sentence; a table that answers anything
else than what was acknowledged is `wrong`, and says how.

`see` is how one running service is asked; another one asks a real process the same way and hands
what it saw to `Acknowledged.faults`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TieringReport
from streamhouse.core.model.transaction import TransactionOperation, TransactionStatus
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._open_transaction import check_parts
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.in_process_service import EVENTS, later, open_manager, routed, table_descriptor

__all__ = [
    "BUILD_STAGES",
    "Acknowledged",
    "SeenTable",
    "TableTruth",
    "Verdict",
    "build",
    "judge",
    "see",
]

BUILD_STAGES: Final = 4
"""How many versions of the directory `build` leaves: `stage-0` is the oldest, the last is whole."""

LOG, KEY, LOADS, QUIET = "default.events", "default.users", "default.loads", "other.quiet"
APP: Final = "loader"
WRITER: Final = 77
SNAPSHOT: Final = 4_611_686_018_427_387_905
_BUCKETS: Final = 2
_FAR_US: Final = 3_600_000_000

Row = tuple[int, str]


@dataclass
class TableTruth:
    """What is acknowledged of one table.

    `log` has the rows of every bucket by offset; of a primary key table it is left empty and `rows`
    has the name of every id, None of one that was deleted. Rows below `truncated` were overwritten,
    those below `tiered` are in the lake too. `staged` are parts of an open transaction.
    """

    log: list[list[Row]] = field(default_factory=lambda: [[] for _ in range(_BUCKETS)])
    rows: dict[int, str | None] = field(default_factory=dict)
    ends: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    truncated: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    tiered: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    version: int | None = None
    sequence: int = 0
    staged: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class SeenTable:
    """What a reader sees of one table: the log's rows from its start on, or rows by key."""

    starts: list[int]
    log: list[list[Row]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    tiered: list[int] = field(default_factory=list)
    rows: dict[int, str | None] = field(default_factory=dict)
    count: int = 0
    is_version_known: bool = True
    is_repetition_known: bool = True


@dataclass
class Acknowledged:
    """What a service promised about its tables."""

    tables: dict[str, TableTruth] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {path: asdict(truth) for path, truth in self.tables.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Acknowledged:
        """Read the JSON form."""
        tables = {}
        for path, fields in value.items():
            truth = TableTruth(**fields)
            truth.rows = {int(key): name for key, name in truth.rows.items()}
            truth.log = [[(row[0], row[1]) for row in rows] for rows in truth.log]
            tables[path] = truth
        return cls(tables)

    def faults(self, path: str, seen: SeenTable) -> list[str]:
        """Return how what was seen of a table differs from what was acknowledged."""
        truth = self.tables[path]
        found = [
            f"{name} are {shown}, not {known}"
            for name, shown, known in (
                ("ends", seen.ends, truth.ends),
                ("truncated offsets", seen.truncated, truth.truncated),
            )
            if shown != known
        ]
        for bucket, (start, tiered, known) in enumerate(
            zip(seen.starts, seen.tiered, truth.tiered, strict=True)
        ):
            if tiered > known:
                found.append(f"bucket {bucket}: tiered up to {tiered}, the lake has {known}")
            first = truth.truncated[bucket]
            if max(start, first) > max(tiered, first):
                found.append(f"bucket {bucket}: rows [{tiered}, {start}) are nowhere")
        if truth.rows:
            found += self._key_faults(truth, seen)
        else:
            found += self._log_faults(truth, seen)
        if not seen.is_version_known:
            found.append("a committed version of an application would be committed again")
        if not seen.is_repetition_known:
            found.append("a repeated append would be stored again")
        return found

    def _key_faults(self, truth: TableTruth, seen: SeenTable) -> list[str]:
        wrong = [key for key, name in truth.rows.items() if seen.rows.get(key) != name]
        found = [f"{len(wrong)} rows by key differ, such as {wrong[0]}"] if wrong else []
        alive = sum(name is not None for name in truth.rows.values())
        if seen.count != alive:
            found.append(f"{seen.count} rows are counted, not {alive}")
        return found

    def _log_faults(self, truth: TableTruth, seen: SeenTable) -> list[str]:
        return [
            f"bucket {bucket}: rows from {start} on differ"
            for bucket, (start, rows) in enumerate(zip(seen.starts, seen.log, strict=True))
            if rows != truth.log[bucket][start:]
        ]


# -- making it -----------------------------------------------------------------------------------


class _Builder:
    def __init__(self, known: Acknowledged) -> None:
        self.known = known
        self._next_id = 0

    def truth(self, path: str) -> TableTruth:
        return self.known.tables.setdefault(path, TableTruth())

    def rows(self, count: int) -> pa.RecordBatch:
        first, self._next_id = self._next_id, self._next_id + count
        return _batch([(number, f"n{number}") for number in range(first, first + count)])

    async def append(self, manager: TabletManager, path: str, count: int) -> None:
        truth, table = self.truth(path), manager.table(TablePath.parse(path))
        truth.sequence += 1
        batches = []
        for bucket in range(_BUCKETS):
            rows = self.rows(count)
            truth.log[bucket] += _pairs(rows)
            batches.append(routed(bucket, rows, writer_id=WRITER, sequence=truth.sequence))
        await manager.append(table, batches)
        truth.ends = _ends(table)

    async def upsert(
        self, manager: TabletManager, path: str, ids: Sequence[int], name: str
    ) -> None:
        truth, table = self.truth(path), manager.table(TablePath.parse(path))
        truth.sequence += 1
        writes = [
            KeyWrite(bucket, _batch([(key, name) for key in chosen]), sequence=truth.sequence)
            for bucket, chosen in _by_bucket(table, ids).items()
        ]
        await manager.write_keys(table, writes, columns=None, writer_id=WRITER)
        truth.rows |= dict.fromkeys(ids, name)
        truth.ends = _ends(table)

    async def delete(self, manager: TabletManager, path: str, ids: Sequence[int]) -> None:
        truth, table = self.truth(path), manager.table(TablePath.parse(path))
        writes = [
            delete_of(bucket, _batch([(key, "") for key in chosen]).select(["id"]))
            for bucket, chosen in _by_bucket(table, ids).items()
        ]
        await manager.write_keys(table, writes, columns=None, writer_id=0)
        truth.rows |= dict.fromkeys(ids, None)
        truth.ends = _ends(table)

    async def load(
        self, manager: TabletManager, path: str, operation: TransactionOperation
    ) -> None:
        """Commit a transaction of the application's next version."""
        truth, table = self.truth(path), manager.table(TablePath.parse(path))
        truth.version = (truth.version or 0) + 1
        transactions = manager.transactions.of(table)
        begun, _ = await transactions.begin(
            operation, columns=None, app_id=APP, version=truth.version, timeout_ms=None
        )
        staged = [self.rows(5) for _ in range(_BUCKETS)]
        part, _ = await transactions.stage(begun, EVENTS, _staged(staged), token=None)
        result = await transactions.commit(begun, [part], wait_s=60)
        assert result is not None
        for bucket, (start, _) in result.ranges.items():
            truth.log[bucket] += _pairs(staged[bucket])
            if operation is TransactionOperation.OVERWRITE:
                truth.truncated[bucket] = start
        truth.ends = _ends(table)

    async def leave_open(self, manager: TabletManager, path: str) -> None:
        """Stage a part of a transaction that nobody has committed yet."""
        table = manager.table(TablePath.parse(path))
        transactions = manager.transactions.of(table)
        begun, _ = await transactions.begin(
            TransactionOperation.APPEND,
            columns=None,
            app_id=None,
            version=None,
            timeout_ms=86_400_000,
        )
        staged = [self.rows(3) for _ in range(_BUCKETS)]
        part, _ = await transactions.stage(begun, EVENTS, _staged(staged), token=None)
        self.truth(path).staged[begun] = [part]

    async def tier(self, manager: TabletManager, path: str) -> None:
        """Register that the lake has everything there is."""
        truth, table = self.truth(path), manager.table(TablePath.parse(path))
        claim = manager.tiering.claim
        answer = await claim("worker", tables=[table], force=True)
        assert answer.assignment is not None
        truncated = {b: offset for b, offset in enumerate(truth.truncated) if offset}
        await manager.tiering.complete(
            table,
            TieringReport(
                table_id=table.info.table_id,
                epoch=answer.assignment.epoch,
                snapshot_id=SNAPSHOT,
                table_uuid="00000000-0000-4000-8000-000000000000",
                tiered_offsets=dict(enumerate(_ends(table))),
                truncated_offsets=truncated,
            ),
        )
        truth.tiered = _ends(table)


async def build(folder: Path) -> Acknowledged:
    """Make `folder/stage-0` and on, each one later and closed cleanly; the last one counts."""
    built = _Builder(Acknowledged())
    data_dir = folder / f"stage-{BUILD_STAGES - 1}"
    for stage in range(BUILD_STAGES):
        async with open_manager(data_dir) as manager:
            await _stage(built, manager, stage)
        if stage < BUILD_STAGES - 1:
            shutil.copytree(data_dir, folder / f"stage-{stage}")
    return built.known


async def _stage(built: _Builder, manager: TabletManager, stage: int) -> None:
    if stage == 0:
        await manager.create_database("other")
        for path in (LOG, LOADS, QUIET):
            await manager.create_table(table_descriptor(path, bucket_count=_BUCKETS))
            built.truth(path)
        await manager.create_table(
            table_descriptor(KEY, bucket_count=_BUCKETS, primary_key=("id",))
        )
        await manager.create_table(table_descriptor("default.dropped"))
        await built.append(manager, LOG, 10)
        await built.upsert(manager, KEY, range(1_000, 1_060), "a")
        await built.load(manager, LOADS, TransactionOperation.APPEND)
        return
    _roll(manager, LOG, LOADS, KEY)
    await built.append(manager, LOG, 20)
    await built.upsert(manager, KEY, range(1_010 * stage - 1_000 * (stage - 1), 1_070), f"b{stage}")
    if stage == 1:
        await built.tier(manager, LOG)
        await built.load(manager, LOADS, TransactionOperation.OVERWRITE)
        table = manager.table(TablePath.parse(QUIET))
        changes = [{"add": "note", "type": "string"}, {"drop": "note", "confirm": "note"}]
        await manager.alter_schema(table.path, changes)
    if stage == 2:
        await manager.drop_table(TablePath.parse("default.dropped"))
        await manager.alter_properties(
            TablePath.parse(LOG), updates={"table.log.ttl": "1d"}, removals=()
        )
        await built.delete(manager, KEY, range(1_000, 1_005))
        await built.tier(manager, LOG)
        await _expire(manager, LOG)
        await built.load(manager, LOADS, TransactionOperation.OVERWRITE)
        await built.tier(manager, LOADS)
    if stage == 3:
        await built.append(manager, QUIET, 4)
        await built.append(manager, LOG, 5)
        await built.load(manager, LOADS, TransactionOperation.APPEND)
        await built.leave_open(manager, LOADS)


def _roll(manager: TabletManager, *paths: str) -> None:
    """Begin a new segment in every bucket; nothing is deleted."""
    for path in paths:
        for tablet in manager.table(TablePath.parse(path)).tablets:
            tablet.apply_retention(timestamp_us_before=clock_us() + _FAR_US, offset_max=0)


async def _expire(manager: TabletManager, path: str) -> None:
    """Delete from the log what is in the lake, in whole segments."""
    table = manager.table(TablePath.parse(path))
    assert await apply_retention(table, later(manager, _FAR_US), is_early=True)


# -- looking at it -------------------------------------------------------------------------------


async def see(manager: TabletManager, path: str, truth: TableTruth) -> SeenTable:
    """Read a whole table; raises what the service answers. What it writes is undone or no row."""
    table = manager.table(TablePath.parse(path))
    positions = table.positions()
    seen = SeenTable(
        starts=[tablet.log_start_offset for tablet in table.tablets],
        ends=_ends(table),
        truncated=[positions[b].truncated_offset for b in range(len(table.tablets))],
        tiered=[positions[b].tiered_offset for b in range(len(table.tablets))],
        log=[_read_log(table, tablet) for tablet in table.tablets],
    )
    if isinstance(table, KeyTable):
        seen.log = []
        seen.count = table.row_count
        seen.rows = _look_up(table, truth)
    seen.is_version_known = await _is_version_known(manager, table, truth)
    seen.is_repetition_known = _is_repetition_known(table, truth)
    return seen


def _read_log(table: OpenTable, tablet: LogTablet) -> list[Row]:
    rows: list[Row] = []
    offset = tablet.log_start_offset
    while offset < tablet.high_watermark:
        for frame in tablet.read(offset, bytes_max=1 << 20):
            decoded = read_stored(frame.payload, table.info, stored_as=frame.schema_id)
            rows += _pairs(decoded)[offset - frame.base_offset :]
            offset = frame.end_offset
    return rows


def _look_up(table: OpenTable, truth: TableTruth) -> dict[int, str | None]:
    ids = sorted(truth.rows)
    keys = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
    found = table.lookup.rows(table.lookup.find(table.lookup.keys(keys))).rows
    return dict(zip(ids, found.column("name").to_pylist(), strict=True))


async def _is_version_known(manager: TabletManager, table: OpenTable, truth: TableTruth) -> bool:
    if truth.version is None:
        return True
    transactions = manager.transactions.of(table)
    begun, status = await transactions.begin(
        TransactionOperation.APPEND,
        columns=None,
        app_id=APP,
        version=truth.version,
        timeout_ms=None,
    )
    if begun:
        transactions.abort(begun)
    return status is TransactionStatus.SKIPPED


def _is_repetition_known(table: OpenTable, truth: TableTruth) -> bool:
    """Whether the last append of the writer, sent again, would be answered as the first time."""
    if not truth.sequence:
        return True
    for tablet in table.tablets:
        try:
            if tablet.find_batch(WRITER, sequence=truth.sequence) is None:
                return False
        except StreamhouseError:
            # Refused, which stores nothing.
            continue
    return True


@dataclass(frozen=True)
class Verdict:
    """Of one table: `right`, `refused` with a sentence, or `wrong`."""

    how: str
    why: str = ""


async def judge(data_dir: Path, known: Acknowledged, **config: Any) -> dict[str, Verdict]:
    """Serve `data_dir` once and say of every table what it is worth.

    The key `""` stands for the service: `refused` if it did not start.
    """
    verdicts: dict[str, Verdict] = {}
    try:
        async with open_manager(data_dir, **config) as manager:
            for path, truth in known.tables.items():
                verdicts[path] = await _judge_table(manager, path, known, truth)
    except StreamhouseError as error:
        return {"": Verdict("refused", error.message)}
    return {"": Verdict("right"), **verdicts}


async def _judge_table(
    manager: TabletManager, path: str, known: Acknowledged, truth: TableTruth
) -> Verdict:
    try:
        seen = await see(manager, path, truth)
    except StreamhouseError as error:
        return Verdict("refused", error.message)
    faults = known.faults(path, seen)
    if faults:
        return Verdict("wrong", "; ".join(faults))
    transactions = manager.transactions.of(manager.table(TablePath.parse(path)))
    try:
        for transaction_id, parts in truth.staged.items():
            transactions.status(transaction_id)
            check_parts(transactions._open[transaction_id], parts, table=path)
    except StreamhouseError as error:
        # Nothing of it was committed, and who stages it again loses nothing.
        return Verdict("refused", error.message)
    return Verdict("right")


# -- small things --------------------------------------------------------------------------------


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    ids, names = [row[0] for row in rows], [row[1] for row in rows]
    return pa.record_batch([pa.array(ids, pa.int64()), names], schema=EVENTS)


def _pairs(rows: pa.RecordBatch) -> list[Row]:
    ids, names = rows.column("id").to_pylist(), rows.column("name").to_pylist()
    return list(zip(ids, names, strict=True))


def _staged(batches: Sequence[pa.RecordBatch]) -> list[RoutedBatch]:
    return [
        RoutedBatch(bucket, rows.num_rows, memoryview(rows.serialize()).cast("B"))
        for bucket, rows in enumerate(batches)
    ]


def _ends(table: OpenTable) -> list[int]:
    return [tablet.high_watermark for tablet in table.tablets]


def _by_bucket(table: OpenTable, ids: Sequence[int]) -> dict[int, list[int]]:
    rows = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
    numbers = buckets_for_rows(rows, table.info.descriptor.effective_bucket_key, _BUCKETS)
    found: dict[int, list[int]] = {}
    for key, bucket in zip(ids, numbers, strict=True):
        found.setdefault(int(bucket), []).append(key)
    return found
