"""The checks before the decision of a transaction: a decided transaction cannot be refused.

The caller holds the table's write gate, so the checked state stays until the decision.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from streamhouse.core.errors import (
    RequestTooLargeError,
    StorageFailedError,
)
from streamhouse.core.model.casts.written_rows import check_staged
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._transaction_chunks import (
    chunks_of,
    key_writes,
)
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionSpec
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, plan_writes
from streamhouse.storage_service.log.staged_part import StagedPart

__all__ = ["check_and_start"]

_SPARE_BYTES: Final = 64 << 20
_ROUND_ROWS: Final = 20_000


async def check_and_start(
    table: OpenTable,
    spec: TransactionSpec,
    parts: Sequence[StagedPart],
    *,
    config: ServiceConfig,
    runtime: Runtime,
) -> dict[int, int]:
    """Return the transaction's first offset in each bucket; raises for an impossible commit."""
    await table.settle()
    buckets = (
        list(range(len(table.tablets)))
        if spec.operation is TransactionOperation.OVERWRITE
        else sorted({bucket for part in parts for bucket in part.rows_by_bucket()})
    )
    for bucket in buckets:
        table.check_writable(bucket)
        log = table.tablets[bucket]
        assert log.high_watermark == log.log_end_offset, "every write has been published"
    _check_space(table, spec, parts, config)
    if not isinstance(table, KeyTable):
        # Of a table with a key the schema stays while the transaction is open.
        for part in parts:
            if part.row_count:
                check_staged(table.info, part.schema)
    if isinstance(table, KeyTable) and _needs_rehearsal(table, spec):
        await _rehearse(table, spec, parts, config, runtime)
    return {bucket: table.tablets[bucket].log_end_offset for bucket in buckets}


def _check_space(
    table: OpenTable, spec: TransactionSpec, parts: Sequence[StagedPart], config: ServiceConfig
) -> None:
    """Refuse rows without disk space: a decided transaction would block the table."""
    # Of a primary key table, rows before and after the change, then the rows by key.
    copies = 3 if isinstance(table, KeyTable) else 1
    needed = copies * sum(part.size_bytes for part in parts) + _SPARE_BYTES
    if isinstance(table, KeyTable) and spec.operation is TransactionOperation.OVERWRITE:
        # Rows that go are in the changelog once more.
        needed += sum(bucket.rows.memory_bytes()["files"] for bucket in table.key_buckets)
    free = shutil.disk_usage(config.data_dir).free
    if free < needed:
        raise StorageFailedError(
            f"table '{table.path}': committing needs about {needed} bytes, and the disk has"
            f" {free} left; nothing was applied"
        )


def _needs_rehearsal(table: OpenTable, spec: TransactionSpec) -> bool:
    """Whether rows may prove impossible only in combination with stored rows."""
    merge = table.info.descriptor.merge_rules()
    is_partial = spec.columns is not None and len(spec.columns) < len(table.info.schema.names)
    return is_partial or bool(merge.aggregates)


async def _rehearse(
    table: KeyTable,
    spec: TransactionSpec,
    parts: Sequence[StagedPart],
    config: ServiceConfig,
    runtime: Runtime,
) -> None:
    """Plan all rows, then take the plan back; raises for the first impossible row."""
    row_count = sum(part.row_count for part in parts)
    if row_count > config.transaction_rehearsed_rows_max:
        raise RequestTooLargeError(
            f"table '{table.path}': a transaction that updates named columns or aggregates may"
            f" have {config.transaction_rehearsed_rows_max} rows"
            f" (transaction_rehearsed_rows_max), this one has {row_count}; commit it in several"
        )
    chunks = chunks_of(
        parts, done={}, bytes_max=config.transaction_chunk_bytes, rows_max=_ROUND_ROWS
    )
    planned: dict[KeyBucket, PlannedWrite] = {}
    try:
        while (chunk := await runtime.run(next, chunks, None)) is not None:
            for writes in key_writes(chunk, rows_max=_ROUND_ROWS):
                await table.key_writer.on_thread(
                    functools.partial(_plan, table, spec, writes, planned)
                )
    finally:
        await table.key_writer.on_thread(functools.partial(_take_back, planned))


def _plan(
    table: KeyTable,
    spec: TransactionSpec,
    writes: Sequence[KeyWrite],
    first: dict[KeyBucket, PlannedWrite],
) -> None:
    is_overwrite = spec.operation is TransactionOperation.OVERWRITE
    rows = [bucket.rows for bucket in table.key_buckets]
    for write in writes:
        bucket = table.key_buckets[write.bucket]
        versions = range(bucket.log.log_end_offset, sys.maxsize) if is_overwrite else None
        (part,) = plan_writes(rows, [write._replace(versions=versions)], columns=spec.columns)
        bucket.rows.accept(part.write)
        first.setdefault(bucket, part.write)


def _take_back(first: Mapping[KeyBucket, PlannedWrite]) -> None:
    for bucket, planned in first.items():
        bucket.rows.abort(planned)
