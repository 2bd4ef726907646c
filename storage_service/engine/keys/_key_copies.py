"""Copies of the rows by key of a running service, for a checkpoint of its journal.

A copy shares its files with the rows, and is made on the thread that writes the rows. Unusable rows
and rows of a table dropped meanwhile get no copy: they are made again from the lake or the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyCopy

__all__ = ["copy_keys", "key_copier"]

_logger = logging.getLogger(__name__)


def key_copier(
    tables: Callable[[], Iterable[OpenTable]], loop: asyncio.AbstractEventLoop
) -> Callable[[Path, Mapping[str, int]], list[KeyCopy]]:
    """Return `copy_keys` for a thread other than the event loop's."""

    def copy(target: Path, known: Mapping[str, int]) -> list[KeyCopy]:
        copying = copy_keys(list(tables()), target, known)
        return asyncio.run_coroutine_threadsafe(copying, loop).result()

    return copy


async def copy_keys(
    tables: Iterable[OpenTable], target: Path, known: Mapping[str, int]
) -> list[KeyCopy]:
    """Copy all rows by key into new directories below `target`.

    `known` maps the paths of copied buckets to the copied offsets: unchanged buckets are not copied
    again.
    """
    copies: list[KeyCopy] = []
    for table in tables:
        if not isinstance(table, KeyTable):
            continue
        for number, keys in enumerate(table.key_buckets):
            bucket = f"tables/{table.info.table_id}/bucket-{number}"
            try:
                copy = await _copy(table, keys, bucket, target, known.get(bucket))
            except StreamhouseError as error:
                _logger.info("event=keys_not_copied bucket=%r why=%r", keys.where, error.message)
                continue
            copies.append(copy)
    return copies


async def _copy(
    table: KeyTable, keys: KeyBucket, bucket: str, target: Path, known: int | None
) -> KeyCopy:
    directory = target / bucket.replace("/", "-")

    def on_thread() -> KeyCopy:
        # Once more here, where it cannot change.
        rows = keys.rows
        if rows.applied_offset == known:
            return KeyCopy(bucket, known, None)
        rows.checkpoint(directory)
        return KeyCopy(bucket, rows.applied_offset, directory)

    keys.check_usable()
    return await table.key_writer.on_thread(on_thread)
