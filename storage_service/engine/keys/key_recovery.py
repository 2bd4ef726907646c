"""Rebuilding the rows of a primary key bucket after loss or damage of the rows' files.

A whole changelog alone makes the rows. Otherwise the rows come from the lake, each with its offset
stored in the lake, and later changes come from the log.

A crash at any moment leaves the former rows, no rows, or all rebuilt rows: the rebuilt rows are
made in a separate directory and moved into place at once, so partial rows never count as whole.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    StorageFailedError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import LakeBucket
from streamhouse.core.model.schema import OFFSET_COLUMN
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.keys.key_bucket import replay_log
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = [
    "KeyRecovery",
    "LakeRows",
    "LostRows",
    "clear_leftovers",
    "make_rows",
    "put_in_place",
    "remake_rows",
]

LakeRows: TypeAlias = Callable[[TableInfo, LakeState, int], LakeBucket]
"""Reads the rows of one bucket at the lake snapshot or at a later one; on several threads."""

_logger = logging.getLogger(__name__)

_DROPPED_SUFFIX: Final = ".dropped"
_RESTORED_SUFFIX: Final = ".restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecovery:
    """The sources for a rebuild: the lake, and the tables to rebuild although rows exist.

    `warm` has rows that are already open.
    """

    lake_rows: LakeRows | None = None
    rebuild: frozenset[TablePath] = frozenset()
    warm: WarmRows | None = None

    def check(self, find: Callable[[TablePath], TableInfo]) -> None:
        """Raise unless every table of `rebuild` exists and has rows by key."""
        for path in sorted(self.rebuild):
            if not find(path).is_primary_key_table:
                raise UnsupportedError(
                    f"table '{path}' has no primary key, so there is nothing to rebuild"
                )


def clear_leftovers(rows: Path) -> None:
    """Delete what a rebuild that did not end has left beside `rows`."""
    dropped = _beside(rows, _DROPPED_SUFFIX)
    if dropped.exists() and not rows.exists():
        # It ended between the two moves: what was there is better than nothing.
        _move(dropped, rows)
    for suffix in (_DROPPED_SUFFIX, _RESTORED_SUFFIX):
        shutil.rmtree(_beside(rows, suffix), ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRows:
    """The rows at `path` to be rebuilt, and the sources of the rebuild."""

    path: Path
    open_rows: Callable[[Path], KvTablet]
    log: LogTablet
    lake_rows: LakeRows | None
    lake: LakeState
    info: TableInfo
    bucket: int
    where: str


def remake_rows(lost: LostRows, *, why: str) -> None:
    """Rebuild lost rows as `make_rows`, and put the rows into place."""
    make_rows(lost, why=why)
    put_in_place(lost.path)


def make_rows(lost: LostRows, *, why: str, go_on: Callable[[], None] = lambda: None) -> None:
    """Rebuild lost rows in a separate directory, from the log alone or from the lake and the log.

    Raises `CorruptDataError` without a usable source; `why` tells the damage of the rows. An error
    of `go_on` ends the rebuild.
    """
    log, where = lost.log, lost.where
    aside = _beside(lost.path, _RESTORED_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    start = log.log_start_offset
    try:
        if start > 0:
            _copy_lake_rows(lost, aside, why=f"{where}: {why}", go_on=go_on)
        with contextlib.closing(lost.open_rows(aside)) as rows:
            replay_log(log, rows, info=lost.info, where=where, go_on=go_on)
            rows.flush()
            counts = (rows.row_count, rows.applied_offset)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    source = "lake" if start else "changelog"
    _logger.warning(
        "event=restored bucket=%r from=%s rows=%d end=%d why=%r", where, source, *counts, why
    )


def put_in_place(rows: Path) -> None:
    """Move the result of `make_rows` to `rows`, and drop the former rows."""
    dropped = _beside(rows, _DROPPED_SUFFIX)
    if rows.exists():
        _move(rows, dropped)
    _move(_beside(rows, _RESTORED_SUFFIX), rows)
    shutil.rmtree(dropped, ignore_errors=True)


def _copy_lake_rows(lost: LostRows, aside: Path, *, why: str, go_on: Callable[[], None]) -> None:
    """Fill `aside` with the lake's rows, at an offset from which the log continues."""
    log = lost.log
    start, end = log.log_start_offset, log.log_end_offset
    why = f"{why}, and the log begins only at {start}"
    if lost.lake_rows is None or lost.lake.snapshot_id is None:
        raise CorruptDataError(
            f"{why}; the table has no lake snapshot to get them from: restore the bucket's kv"
            " directory from a backup"
        )
    try:
        lake_part = lost.lake_rows(lost.info, lost.lake, lost.bucket)
    except StreamhouseError as error:
        raise type(error)(f"{why}; they cannot be read from the lake: {error.message}") from error
    if not start <= lake_part.end_offset <= end:
        raise CorruptDataError(
            f"{why} and ends at {end}; the lake has them up to {lake_part.end_offset}, so"
            " changes between are missing: restore the bucket's kv directory from a backup"
        )
    log_fingerprint = (
        None if lake_part.fingerprint is None else log.fingerprint(lake_part.end_offset)
    )
    if log_fingerprint is not None and log_fingerprint.hex() != lake_part.fingerprint:
        raise HistoryDivergedError(
            f"{why}; the lake has other rows below offset {lake_part.end_offset} than the log, so"
            " they cannot be got from there: see 'Two histories' in docs/operations.md"
        )
    with contextlib.closing(lost.open_rows(aside)) as restored:
        for batch in lake_part.batches:
            go_on()
            versions = batch.column(OFFSET_COLUMN).to_numpy()
            restored.restore(batch.drop_columns([OFFSET_COLUMN]), versions)
        restored.restored(lake_part.end_offset)


def _beside(rows: Path, suffix: str) -> Path:
    return rows.with_name(rows.name + suffix)


def _move(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    try:
        source.rename(target)
        LocalFilesystem().sync_directory(source.parent)
    except OSError as error:
        raise StorageFailedError(f"{source} cannot be moved: {error.strerror}") from error
