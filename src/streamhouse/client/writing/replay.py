"""Rejected rows tried again: a fitting row is written and leaves `t$rejected` in one transaction.

Replays of a table count up: each transaction's version is one more than the last committed version.
The slower of two concurrent replays finds the version taken, writes nothing, and starts again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from streamhouse.client.writing._rejects import Rejects, RejectsClient
from streamhouse.client.writing.transactions import StagedRejects
from streamhouse.core.errors import CheckFailedError, TableNotFoundError
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.rows.companion import ID_COLUMN, rejected_path
from streamhouse.core.rows.division import divide_rows

__all__ = ["Fix", "Replayed", "replay_rejected"]

Fix = Callable[[dict[str, Any]], Mapping[str, Any] | None]

_APP_ID: Final = "streamhouse.replay"
_CHUNK_ROWS: Final = 10_000
_CHANGES: Final = {"delete": "-D"}


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: rows moved into the table, and rows still rejected."""

    moved: int
    left: int


class _Written(NamedTuple):
    """The rows of each transaction, and whether a faster replay has taken the next version."""

    row_counts: Sequence[int]
    is_version_taken: bool = False


class _Client(RejectsClient, Protocol):
    """The client's calls for this module."""

    def describe_table(self, path: str) -> TableInfo: ...


def replay_rejected(
    client: _Client, path: str, *, read: Callable[[str], pa.Table], fix: Fix | None
) -> Replayed:
    """Try every rejected row of a table once; `read` returns a table's rows."""
    table = client.describe_table(path)
    companion = str(rejected_path(TablePath.parse(path)))
    tried: set[str] = set()
    moved = 0
    while True:
        version = _next_version(client, table)
        try:
            rows = read(companion).sort_by([("rejected_at", "ascending"), (ID_COLUMN, "ascending")])
        except TableNotFoundError:
            return Replayed(0, 0)
        moved_since = 0
        waiting = [row for row in rows.to_pylist() if row[ID_COLUMN] not in tried]
        for start in range(0, len(waiting), _CHUNK_ROWS):
            chunk = waiting[start : start + _CHUNK_ROWS]
            written = _replay_chunk(client, table, chunk, fix, version)
            moved += sum(written.row_counts)
            moved_since += sum(written.row_counts)
            version += len(written.row_counts)
            if written.is_version_taken:
                # Another replay was faster: the rows it moved must not be written again.
                break
            tried.update(row[ID_COLUMN] for row in chunk)
        else:
            return Replayed(moved, left=rows.num_rows - moved_since)


def _next_version(client: _Client, table: TableInfo) -> int:
    transaction = client.begin_transaction(
        str(table.path), operation=_operation(table), app_id=_APP_ID, version=0
    )
    if transaction.is_skipped:
        return (transaction.last_version or 0) + 1
    transaction.abort()
    return 0


def _operation(table: TableInfo) -> str:
    return "upsert" if table.is_primary_key_table else "append"


def _replay_chunk(
    client: _Client,
    table: TableInfo,
    rejected: Sequence[Mapping[str, Any]],
    fix: Fix | None,
    version: int,
) -> _Written:
    """Write the fitting rows, in transactions from `version` on."""
    ids, rows = _rows_to_try(table, rejected, fix)
    checked = divide_rows(table, rows)
    fitting_ids = [row_id for position, row_id in enumerate(ids) if position not in checked.misfits]
    return _write_fitting(client, table, fitting_ids, checked.rows, version)


def _write_fitting(
    client: _Client, table: TableInfo, ids: Sequence[str], rows: pa.RecordBatch, version: int
) -> _Written:
    """Write rows; a row that breaks a constraint stays rejected."""
    if not ids:
        return _Written([])
    try:
        is_taken = not _commit_replayed(client, table, ids, rows, version)
    except CheckFailedError:
        half = len(ids) // 2
        if not half:
            return _Written([])
        first = _write_fitting(client, table, ids[:half], rows.slice(0, half), version)
        if first.is_version_taken:
            return first
        version += len(first.row_counts)
        second = _write_fitting(client, table, ids[half:], rows.slice(half), version)
        return _Written([*first.row_counts, *second.row_counts], second.is_version_taken)
    return _Written([], is_version_taken=True) if is_taken else _Written([len(ids)])


def _commit_replayed(
    client: _Client, table: TableInfo, ids: Sequence[str], rows: pa.RecordBatch, version: int
) -> bool:
    """Write rows, and delete the rejected rows `ids`; False if the version is taken."""
    path = str(table.path)
    with client.begin_transaction(
        path, operation=_operation(table), app_id=_APP_ID, version=version
    ) as transaction:
        if transaction.is_skipped:
            return False
        deletion = Rejects(client, transaction, path=path).begin("delete")
        staged_deletes = StagedRejects(
            deletion.transaction_id, (deletion.stage(pa.table({ID_COLUMN: list(ids)})),)
        )
        result = transaction.commit([transaction.stage(rows)], rejected=staged_deletes)
        return not result.is_skipped


def _rows_to_try(
    table: TableInfo, rejected: Sequence[Mapping[str, Any]], fix: Fix | None
) -> tuple[list[str], list[dict[str, Any]]]:
    ids, rows = [], []
    for row in rejected:
        if not row["is_whole"]:
            continue
        values = json.loads(row["row"])
        if table.is_primary_key_table and row["operation"] in _CHANGES:
            values[CHANGE_TYPE_COLUMN] = _CHANGES[row["operation"]]
        row_to_try = values if fix is None else fix(dict(values))
        if row_to_try is not None:
            ids.append(row[ID_COLUMN])
            rows.append(dict(row_to_try))
    return ids, rows
