"""A service that commits transactions until it kills itself at a chosen step.

    python -m tests.simulation.transaction_crash_child <data dir> <table> <step> <passes>

`table` is `events` (a log table), `rows` (a primary key table), or one of each that every
transaction overwrites, `refilled` and `replaced`. What it does is known from the number of each
transaction alone; what it has been told is in the file `told`, a line each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.core.model.transaction import (
    Isolation,
    ReadPosition,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._transaction_commit import TransactionCommit
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
)
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem, LocalWritableFile
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.simulation.fate import Fate
from tests.support.in_process_service import EVENTS, open_manager, routed, table_descriptor

BUCKETS = 3
PARTS = 4
ROWS = 20
CONFIG = {"transaction_chunk_bytes": 1_500, "transaction_outcomes_max": 5}

# Where a life ends, in the order of a commit.
STEPS = (
    "part half written",
    "part written",
    "begun to commit",
    "decision half written",
    "decision written",
    "decided",
    "frames half written",
    "one log synced",
    "piece stored",
    "all stored",
    "outcome half written",
    "outcome written",
    "outcome durable",
    "visible",
    "files half deleted",
)
OPERATIONS = {
    "events": TransactionOperation.APPEND,
    "rows": TransactionOperation.UPSERT,
    "refilled": TransactionOperation.OVERWRITE,
    "replaced": TransactionOperation.OVERWRITE,
}
LOG_TABLES = ("events", "refilled")
DECIDED = STEPS[STEPS.index("decided") :]
"""After these steps the transaction is there, acknowledged or not."""


def part_rows(number: int, part: int, bucket: int) -> pa.RecordBatch:
    """Return what part `part` of transaction `number` has for a bucket.

    Ids of a transaction are its own in a log table; in a primary key table they come again.
    """
    first = ((number * PARTS + part) * BUCKETS + bucket) * ROWS
    ids = range(first, first + ROWS)
    return pa.record_batch([pa.array(ids, pa.int64()), [f"t{number}"] * ROWS], schema=EVENTS)


def key_rows(number: int, part: int, bucket: int) -> pa.RecordBatch:
    """Return the upserts of a part: half of the keys also those of the part before.

    And some of them others than those of the transaction before.
    """
    ids = [(number % 5 * 7 + part * ROWS // 2 + i) * BUCKETS + bucket for i in range(ROWS)]
    return pa.record_batch([pa.array(ids, pa.int64()), [f"t{number}p{part}"] * ROWS], schema=EVENTS)


async def make_table(manager: TabletManager, name: str) -> OpenTable:
    """Return the table, made unless it is there."""
    if not manager.list_tables(None):
        key = () if name in LOG_TABLES else ("id",)
        await manager.create_table(table_descriptor(name, bucket_count=BUCKETS, primary_key=key))
    return next(iter(manager.open_tables()))


def staged(name: str, number: int, part: int) -> list[RoutedBatch]:
    """Return one part, a batch a bucket."""
    rows = part_rows if name in LOG_TABLES else key_rows
    return [
        RoutedBatch(bucket, ROWS, memoryview(rows(number, part, bucket).serialize()).cast("B"))
        for bucket in range(BUCKETS)
    ]


async def write_between(manager: TabletManager, table: OpenTable, number: int) -> None:
    """Write one row that belongs to no transaction, as others do."""
    row = pa.record_batch([pa.array([-1 - number], pa.int64()), ["alone"]], schema=EVENTS)
    if isinstance(table, KeyTable):
        await manager.write_keys(table, [KeyWrite(0, row)], columns=None, writer_id=0)
    else:
        await manager.append(table, [routed(number % BUCKETS, row)])


def position(table: OpenTable) -> ReadPosition:
    """Return where the table is: a commit that has read this allows nobody else's rows."""
    offsets = {bucket: at.high_watermark for bucket, at in table.positions().items()}
    return ReadPosition(offsets=offsets, isolation=Isolation.SERIALIZABLE)


async def transact(
    table: OpenTable,
    transactions: TableTransactions,
    number: int,
    tell: Callable[[str], None],
) -> None:
    """Commit transaction `number`, which is version `number` of an application.

    It depends on what the table has when it begins.
    """
    name = table.path.table
    read = position(table)
    begun, status = await transactions.begin(
        OPERATIONS[name], columns=None, app_id="app", version=number, timeout_ms=None
    )
    if status is TransactionStatus.SKIPPED:
        tell(f"skipped {number}")
        return
    parts = []
    for part in range(PARTS):
        for _ in range(2):
            # The second is a retried attempt's, which nobody names.
            part_id, _ = await transactions.stage(
                begun, EVENTS, staged(name, number, part), token=None
            )
        parts.append(part_id)
    tell(f"staged {number} {begun} {' '.join(parts)}")
    result = await transactions.commit(begun, parts, wait_s=60, read=read)
    assert result is not None
    tell(f"committed {number}")


def _watch(fate: Fate) -> None:
    """Put the steps into the parts of the service."""

    def around(owner: type, name: str, before: str, after: str) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            fate.reach(before)
            result = real(self, *args, **kwargs)
            fate.reach(after)
            return result

        setattr(owner, name, watched)

    around(TransactionFiles, "stage", "", "part written")
    around(TransactionFiles, "drop", "", "files half deleted")
    around(TransactionCommit, "publish", "outcome durable", "visible")
    around(LogTablet, "sync", "", "one log synced")
    _watch_decisions(fate)
    _watch_pieces(fate)
    _watch_files(fate)


def _watch_decisions(fate: Fate) -> None:
    real = TransactionFiles.decide

    def decide(self: TransactionFiles, decision: Decision) -> None:
        is_first = decision.result.status is TransactionStatus.COMMITTING
        fate.reach("begun to commit" if is_first else "all stored")
        real(self, decision)
        fate.reach("decided" if is_first else "outcome durable")

    TransactionFiles.decide = decide  # type: ignore[method-assign] - to be watched
    rename = LocalFilesystem.rename

    def renamed(self: LocalFilesystem, source: Path, target: Path) -> None:
        rename(self, source, target)
        if target.name.endswith(".decision"):
            is_first = b'"committing"' in target.read_bytes()
            fate.reach("decision written" if is_first else "outcome written")

    LocalFilesystem.rename = renamed  # type: ignore[method-assign] - to be watched


def _watch_pieces(fate: Fate) -> None:
    real = TransactionCommit._stored

    async def stored(self: TransactionCommit, *args: Any) -> int:
        timestamp_us = await real(self, *args)
        fate.reach("piece stored")
        return timestamp_us

    TransactionCommit._stored = stored  # type: ignore[method-assign] - to be watched


def _watch_files(fate: Fate) -> None:
    """A kill between two bytes of a file: half of them are there."""
    create, write = LocalFilesystem.create, LocalWritableFile.write
    names: dict[int, str] = {}

    def created(self: LocalFilesystem, path: Path) -> Any:
        file = create(self, path)
        names[id(file)] = path.name
        return file

    def written(self: LocalWritableFile, buffers: Any, *, position: int) -> None:
        name = names.get(id(self), "")
        step = "frames half written"
        if ".part" in name:
            step = "part half written"
        elif ".decision" in name:
            is_first = b'"committing"' in bytes(buffers[0])
            step = "decision half written" if is_first else "outcome half written"
        if step == fate.point:
            data = b"".join(buffers)
            write(self, [data[: len(data) // 2]], position=position)
            fate.reach(step)
        write(self, buffers, position=position)

    LocalFilesystem.create = created  # type: ignore[method-assign] - to be watched
    LocalWritableFile.write = written  # type: ignore[method-assign] - to be watched


async def _live(data_dir: Path, name: str, first: int, fate: Fate) -> None:
    with (data_dir / "told").open("a", buffering=1) as told:
        async with open_manager(data_dir / "data", **CONFIG) as manager:
            table = await make_table(manager, name)
            transactions = manager.transactions.of(table)
            _watch(fate)
            for number in range(first, first + 50):
                await transact(table, transactions, number, lambda line: told.write(line + "\n"))
                await write_between(manager, table, number)
                told.write(f"wrote {number}\n")


def main(data_dir: Path, name: str, step: str, first: int, passes: int) -> None:
    """Live one life, from transaction `first` on."""
    asyncio.run(_live(data_dir, name, first, Fate(step, passes)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
