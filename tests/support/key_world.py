"""A world for reads of a primary key table: both tiers, and a dict of rows beside.

Buckets are chosen by the test; each has a model of its own, which makes the changelog that goes
into the log, line by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.client import LogBatch
from streamhouse.storage_service.model.changelog import CHANGE_TYPE_NAMES, INSERT, UPDATE_AFTER
from streamhouse.storage_service.model.merge_engine import MergeRules
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo, TablePath
from tests.support.kv_model import Change, Entry, KvModel
from tests.support.union_world import UnionWorld

__all__ = ["Address", "KeyWorld"]

Address = tuple[int, int]
"""(bucket, offset)"""


@dataclass(frozen=True)
class Moment:
    """The table after one write."""

    timestamp_us: int
    rows: dict[Address, dict[str, Any]]


class KeyWorld(UnionWorld):
    """One primary key table `db.t`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.models: list[KvModel] = []
        self.moments: list[Moment] = []

    def create_key_table(
        self,
        schema: pa.Schema,
        *,
        primary_key: Sequence[str] = ("id",),
        bucket_count: int = 1,
        partitioned_by: Sequence[str] = (),
        properties: dict[str, str] | None = None,
    ) -> TableInfo:
        info = self.service.create_table(
            TableDescriptor(
                path=TablePath.parse(self.PATH),
                schema=Schema.from_arrow(schema),
                primary_key=tuple(primary_key),
                bucket_count=bucket_count,
                partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
                properties=properties or {},
            )
        )
        rules = MergeRules.parse(
            properties or {}, schema=info.schema, primary_key=tuple(primary_key), table=self.PATH
        )
        self.models = [KvModel(info.schema, tuple(primary_key), rules) for _ in range(bucket_count)]
        return info

    def write(self, bucket: int, changes: Sequence[Change]) -> list[Entry]:
        """Apply changes to one bucket as one batch; return what that adds to the changelog."""
        entries = self.models[bucket].apply(changes)
        if entries:
            self._log(bucket, entries)
            rows = self.live_rows()
            self.moments.append(Moment(self.service._now_us, rows))
        return entries

    def upsert(self, bucket: int, *rows: dict[str, Any]) -> list[Entry]:
        return self.write(bucket, [("upsert", row) for row in rows])

    def delete(self, bucket: int, *keys: dict[str, Any]) -> list[Entry]:
        return self.write(bucket, [("delete", key) for key in keys])

    def live_rows(self) -> dict[Address, dict[str, Any]]:
        """The table as it must be read: the row of each live version by its address."""
        return {
            (bucket, offset): row
            for bucket, model in enumerate(self.models)
            for offset, row in model.rows.values()
        }

    def rows_at(self, ends: Mapping[int, int]) -> dict[Address, dict[str, Any]]:
        """The table as it was when each bucket's changelog ended at `ends`."""
        found = {}
        for bucket, model in enumerate(self.models):
            entries = model.log[: ends[bucket]]
            retracted = {entry.retracts for entry in entries}
            found |= {
                (bucket, entry.offset): entry.row
                for entry in entries
                if entry.change_type in (INSERT, UPDATE_AFTER) and entry.offset not in retracted
            }
        return found

    def changes(self) -> dict[Address, tuple[str, dict[str, Any]]]:
        """The whole changelog: the change type and row of every line by its address."""
        return {
            (bucket, entry.offset): (CHANGE_TYPE_NAMES[entry.change_type], entry.row)
            for bucket, model in enumerate(self.models)
            for entry in model.log
        }

    def _log(self, bucket: int, entries: Sequence[Entry]) -> None:
        table = self.service._table(self.PATH)
        self.service._now_us += 1_000
        lines = [
            {**entry.row, "__change_type": entry.change_type, "__retracts": entry.retracts}
            for entry in entries
        ]
        table.batches[bucket].append(
            LogBatch(
                bucket=bucket,
                base_offset=entries[0].offset,
                timestamp_us=self.service._now_us,
                data=pa.RecordBatch.from_pylist(lines, schema=table.info.log_schema),
            )
        )
