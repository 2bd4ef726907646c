"""Staging a backup: a directory with everything a service needs to start from one moment's state.

Tables of a running service are staged one after the other, each as a consistent cut of all its
buckets. The order matters, because the parts change during the copy:

1. the lake states, then the lake's catalog: the catalog's copy has every registered snapshot
2. a table's rows by key: older rows are brought up to date from the log at the start
3. the table's transactions and the ends of its logs, at one moment without changes
4. the logs up to these ends, last: the logs have every row mentioned by the other parts

The caller prevents the creation and the drop of tables and the deletion of segments meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from streamhouse.core.errors import (
    AlreadyExistsError,
    StorageFailedError,
)
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions.transaction_files import (
    OUTCOMES_FILE,
)
from streamhouse.storage_service.log.log_copy import copy_log, link_or_copy
from streamhouse.storage_service.log.segments.segment_format import (
    LogIdentity,
    offsets_of,
    segment_path,
)

__all__ = [
    "STAGING",
    "BucketEnds",
    "already_staged",
    "clear_staging",
    "stage_closed",
    "stage_running",
]

_logger = logging.getLogger(__name__)

STAGING: Final = "backup.staged"
"""The directory, within the data directory, where a backup is put together."""

BucketEnds = dict[str, dict[str, int]]
"""bucket -> log_start_offset, log_end_offset, and applied_offset of the rows by key."""

_NEVER_CHANGE: Final = {".index", ".writers", ".sst"}


def clear_staging(directory: DataDirectory) -> None:
    """Remove the leftovers of a backup, if any."""
    shutil.rmtree(directory.path / STAGING, ignore_errors=True)


def already_staged(staged: Path) -> AlreadyExistsError:
    """Return the error for an existing entry at `staged`, the place of the backup."""
    return AlreadyExistsError(
        f"another backup is being taken in {staged}, or was broken off; to give it up use"
        " --discard-staged"
    )


async def stage_running(
    directory: DataDirectory,
    tables: Sequence[OpenTable],
    *,
    damaged: Sequence[int] = (),
    with_lake: bool,
    runtime: Runtime,
) -> dict[int, BucketEnds]:
    """Stage a running service's tables; return the staged parts by table id.

    The tables with the ids `damaged` are not served and have no writers: their files are copied as
    they are, with the damage.

    Raises `AlreadyExistsError` if another backup is staged. After any other error nothing is
    staged.
    """
    staged = await runtime.run(_new_staging, directory)
    try:
        for table in tables:
            await runtime.run(_copy_facts, directory, staged, table.info.table_id)
        for table_id in damaged:
            await runtime.run(_copy_damaged, directory, staged, table_id)
        if with_lake:
            await runtime.run(_copy_lake, directory, staged)
        return {
            table.info.table_id: await _stage_table(directory, staged, table, runtime)
            for table in tables
        }
    except OSError as error:
        await runtime.run(clear_staging, directory)
        raise StorageFailedError(f"the backup cannot be written: {error}") from error
    except BaseException:
        await runtime.run(clear_staging, directory)
        raise


def stage_closed(directory: DataDirectory, *, with_lake: bool) -> None:
    """Stage the tables of an unused directory; the caller holds its lock."""
    staged = _new_staging(directory)
    try:
        for path in directory.tables.iterdir():
            if path.name.isdigit():
                _copy_closed(path, staged.tables / path.name)
        if with_lake:
            _copy_lake(directory, staged)
    except OSError as error:
        clear_staging(directory)
        raise StorageFailedError(f"the backup cannot be written: {error}") from error


def _new_staging(directory: DataDirectory) -> DataDirectory:
    staged = DataDirectory(directory.path / STAGING)
    try:
        staged.path.mkdir()
    except FileExistsError as error:
        raise already_staged(staged.path) from error
    staged.tables.mkdir()
    shutil.copy2(directory.service_file, staged.service_file)
    return staged


def _copy_facts(directory: DataDirectory, staged: DataDirectory, table_id: int) -> None:
    """Copy a table's descriptor, lake state and pins."""
    target = staged.table(table_id)
    target.mkdir()
    for path in directory.table(table_id).glob("*.json"):
        shutil.copy2(path, target / path.name)


def _copy_damaged(directory: DataDirectory, staged: DataDirectory, table_id: int) -> None:
    # Its directory may be what it has lost.
    if directory.table(table_id).is_dir():
        _copy_closed(directory.table(table_id), staged.table(table_id))


def _copy_lake(directory: DataDirectory, staged: DataDirectory) -> None:
    """Copy the default catalog in a single transaction, and link the warehouse's files."""
    source, target = directory.path / "lake", staged.path / "lake"
    target.mkdir()
    catalog = source / "catalog.db"
    if catalog.exists():
        with (
            contextlib.closing(sqlite3.connect(f"file:{catalog}?mode=ro", uri=True)) as reading,
            contextlib.closing(sqlite3.connect(target / "catalog.db")) as writing,
        ):
            reading.backup(writing)
    (target / "warehouse").mkdir()
    for path in sorted((source / "warehouse").rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir()
        else:
            # Files of a lake never change; maintenance may delete one that nobody needs any more.
            with contextlib.suppress(FileNotFoundError):
                link_or_copy(path, copy)


async def _stage_table(
    directory: DataDirectory, staged: DataDirectory, table: OpenTable, runtime: Runtime
) -> BucketEnds:
    table_id = table.info.table_id
    applied = await _stage_rows(staged, table) if isinstance(table, KeyTable) else {}
    # Alone, no write or commit is half done: what it has recorded is what the log shows.
    async with table.gate.alone():
        await runtime.run(_link_transactions, directory, staged, table_id)
        ends = [tablet.high_watermark for tablet in table.tablets]
    assert all(ends[bucket] >= offset for bucket, offset in applied.items())
    return await runtime.run(_copy_logs, directory, staged, table_id, ends, applied)


async def _stage_rows(staged: DataDirectory, table: KeyTable) -> dict[int, int]:
    """Stage rows by key; return the applied offset of each bucket."""
    applied: dict[int, int] = {}
    for bucket, keys in enumerate(table.key_buckets):
        if not keys.is_usable:
            # The next start makes them again, there as here.
            _logger.warning("event=backup_without_rows bucket=%r", keys.where)
            continue
        target = staged.key_rows(table.info.table_id, bucket)
        applied[bucket] = await _checkpoint(table, keys, target)
    return applied


async def _checkpoint(table: KeyTable, keys: KeyBucket, target: Path) -> int:
    applied_offset = 0

    def checkpoint() -> None:
        nonlocal applied_offset
        target.parent.mkdir()
        keys.rows.checkpoint(target)
        applied_offset = keys.rows.applied_offset

    await table.key_writer.on_thread(checkpoint)
    return applied_offset


def _link_transactions(directory: DataDirectory, staged: DataDirectory, table_id: int) -> None:
    """Give a table's transaction files second names; the files are replaced, never changed."""
    source, target = directory.transactions(table_id), staged.transactions(table_id)
    if not source.is_dir():
        return
    target.mkdir()
    # A decision is removed once it is among the outcomes: looked at last, these have it then.
    for path in sorted(source.iterdir(), key=lambda path: path.name == OUTCOMES_FILE):
        if path.suffix != ".tmp":
            # An open transaction may be aborted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                link_or_copy(path, target / path.name)


def _copy_logs(
    directory: DataDirectory,
    staged: DataDirectory,
    table_id: int,
    ends: Sequence[int],
    applied: Mapping[int, int],
) -> BucketEnds:
    copied: BucketEnds = {}
    for bucket, end in enumerate(ends):
        log = copy_log(
            directory.bucket(table_id, bucket),
            staged.bucket(table_id, bucket),
            identity=LogIdentity(table_id, bucket),
            end_offset=end,
        )
        copied[str(bucket)] = log._asdict()
        if bucket in applied:
            copied[str(bucket)]["applied_offset"] = applied[bucket]
    return copied


def _copy_closed(source: Path, target: Path) -> None:
    """Copy a directory without writers; immutable files are linked."""
    target.mkdir()
    names = [path.name for path in source.iterdir()]
    sealed = {segment_path(source, base) for base in offsets_of(names, ".log")[:-1]}
    for path in source.iterdir():
        copy = target / path.name
        if path.is_dir():
            _copy_closed(path, copy)
        elif path in sealed or path.suffix in _NEVER_CHANGE:
            link_or_copy(path, copy)
        else:
            shutil.copy2(path, copy)
