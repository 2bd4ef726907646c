"""What the files of a table's transactions state, for a process that follows a data directory."""

from __future__ import annotations

from collections.abc import Collection

from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.storage_service.directory.data_directory import DECISION_SUFFIX, DataDirectory
from streamhouse.storage_service.engine.transactions.transaction_files import (
    TRUNCATED_FILE,
    TransactionFiles,
)

__all__ = ["is_committing", "rows_begin_at"]


def is_committing(directory: DataDirectory, table_id: int, name: str) -> bool:
    """Whether the decision in this file of a table has no outcome yet.

    A missing file has an outcome, folded into another file. Raises `CorruptDataError`.
    """
    files = _files_of(directory, table_id)
    if not (files.directory / name).exists():
        return False
    return files.load_decision(name).result.status is TransactionStatus.COMMITTING


def rows_begin_at(
    directory: DataDirectory, table_id: int, names: Collection[str]
) -> dict[int, int]:
    """Return where the rows of each bucket begin, as far as these files of a table's state it.

    Buckets without an overwrite are missing. A missing decision is folded into other files. Raises
    `CorruptDataError`.
    """
    files = _files_of(directory, table_id)
    offsets: dict[int, int] = {}
    if TRUNCATED_FILE in names:
        files.load_folded()
        offsets, _ = files.load_truncated()
    for name in names:
        if name.endswith(DECISION_SUFFIX) and (files.directory / name).exists():
            decision = files.load_decision(name)
            # As at the start of an owner: of the last overwrite only this may tell.
            if decision.result.status is TransactionStatus.COMMITTED:
                for bucket, offset in decision.truncated_offsets.items():
                    offsets[bucket] = max(offsets.get(bucket, 0), offset)
    return offsets


def _files_of(directory: DataDirectory, table_id: int) -> TransactionFiles:
    return TransactionFiles(
        directory.transactions(table_id),
        service_id=directory.service_id,
        table_id=table_id,
        filesystem=directory.filesystem,
    )
