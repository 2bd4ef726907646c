"""A primary key bucket as the service runs it: a tablet, and a log that survives crashes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.model.changelog import (
    DELETE,
    INSERT,
    UPDATE_AFTER,
)
from streamhouse.storage_service.model.merge_engine import MergeRules
from streamhouse.storage_service.model.schema import (
    CHANGE_TYPE_COLUMN,
    RETRACTS_COLUMN,
    Schema,
)
from tests.support.kv_model import Entry, identity
from tests.support.kv_rows import Batch, batch_of, operations_of_changes

__all__ = ["LoggedBucket", "entries_of", "fold_log", "simple_rules"]


def simple_rules(**properties: str) -> TableRules:
    """Return a table `id bigint, name string, amount double` with key `id`."""
    schema = Schema.from_arrow(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string()),
                pa.field("amount", pa.float64()),
            ]
        )
    )
    merge = MergeRules.parse(properties, schema=schema, primary_key=("id",), table="db.t")
    return TableRules(table="db.t", schema=schema, primary_key=("id",), merge=merge)


def entries_of(changelog: pa.RecordBatch, base_offset: int) -> list[Entry]:
    """Return the lines of a changelog batch."""
    entries = []
    for position, line in enumerate(changelog.to_pylist()):
        change_type, retracts = line.pop(CHANGE_TYPE_COLUMN), line.pop(RETRACTS_COLUMN)
        entries.append(Entry(base_offset + position, change_type, retracts, line))
    return entries


def fold_log(entries: Sequence[Entry], primary_key: Sequence[str]) -> dict[Any, tuple[int, Any]]:
    """Return what a reader of the changelog alone ends up with: version and row by key."""
    state: dict[Any, tuple[int, Any]] = {}
    for entry in entries:
        key = tuple(entry.row[name] for name in primary_key)
        if entry.change_type in (INSERT, UPDATE_AFTER):
            assert entry.retracts == (state[key][0] if key in state else None)
            state[key] = (entry.offset, entry.row)
        elif entry.change_type == DELETE:
            assert entry.retracts == state[key][0]
            assert identity(entry.row) == identity(state.pop(key)[1])
        else:
            assert identity(entry.row) == identity(state[key][1])
    return state


class LoggedBucket:
    """`log` holds (base offset, changelog batch) of what is durable; `tablet` may be reopened."""

    def __init__(self, path: Path, rules: TableRules, *, options: KvOptions | None = None) -> None:
        self.path = path
        self.rules = rules
        self.options = options
        self.log: list[tuple[int, pa.RecordBatch]] = []
        self.tablet = self._open()

    def _open(self) -> KvTablet:
        return KvTablet(self.path, table_id=7, bucket=0, rules=self.rules, options=self.options)

    @property
    def entries(self) -> list[Entry]:
        return [entry for base, batch in self.log for entry in entries_of(batch, base)]

    def plan(self, batch: Batch) -> PlannedWrite:
        return self.tablet.plan(
            batch_of(self.rules, batch),
            base_offset=self.tablet.planned_offset,
            operations=operations_of_changes(batch),
            columns=batch.columns,
        )

    def append(self, planned: PlannedWrite) -> None:
        """Make the changelog durable."""
        if planned.changelog.num_rows:
            self.log.append((planned.base_offset, planned.changelog))

    def write(self, batch: Batch) -> PlannedWrite:
        planned = self.plan(batch)
        self.append(planned)
        self.tablet.apply(planned)
        return planned

    def reopen(self, *, replay_from: int = 0) -> None:
        """Close without flushing and open again, as after a crash; replay at least what is needed.

        `replay_from` is the number of log batches to skip, if they are not needed.
        """
        self.tablet.close()
        self.tablet = self._open()
        self.replay(replay_from)

    def replay(self, skipped: int = 0) -> None:
        for base_offset, batch in self.log[skipped:]:
            if base_offset + batch.num_rows > self.tablet.applied_offset or skipped == 0:
                self.tablet.replay(batch, base_offset=base_offset)

    def lookup_all(self, keys: Sequence[tuple[Any, ...]]) -> dict[Any, Any]:
        """Return the rows found of `keys`, by key."""
        schema = self.rules.schema.select(self.rules.primary_key, table="").to_arrow()
        columns = [pa.array([key[i] for key in keys], f.type) for i, f in enumerate(schema)]
        found = self.tablet.lookup(pa.RecordBatch.from_arrays(columns, schema=schema))
        assert found.end_offset == self.tablet.applied_offset
        positions = np.flatnonzero(found.found).tolist()
        rows = found.rows.to_pylist()
        assert len(rows) == len(positions)
        return {keys[i]: row for i, row in zip(positions, rows, strict=True)}
