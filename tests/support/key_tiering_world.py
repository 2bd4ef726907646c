"""A world for tiering primary key tables: the tiering world, its changelog made by a dict model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.model.bucketing import buckets_for_rows
from streamhouse.storage_service.model.changelog import CHANGE_TYPE_NAMES
from streamhouse.storage_service.model.table import TableInfo
from tests.support.kv_model import Change, Entry, KvModel, identity
from tests.support.tiering_world import TieringWorld

__all__ = ["KEY_SCHEMA", "KeyTieringWorld"]

KEY_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("amount", pa.float64()),
    ]
)

Row = dict[str, Any]


class KeyTieringWorld(TieringWorld):
    """One primary key table `db.t`; `rows` is what it holds, by key, `live` also by address."""

    PATH = "db.t"

    def create_key_table(
        self,
        schema: pa.Schema = KEY_SCHEMA,
        *,
        primary_key: Sequence[str] = ("id",),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] = (),
        properties: dict[str, str] | None = None,
    ) -> TableInfo:
        self.info = self.create_table(
            self.PATH,
            schema,
            primary_key=primary_key,
            bucket_count=bucket_count,
            bucket_key=bucket_key,
            partitioned_by=partitioned_by,
            properties=properties,
        )
        merge = self.info.descriptor.merge_rules()
        self.buckets = [
            KvModel(self.info.schema, self.info.descriptor.primary_key, merge)
            for _ in range(bucket_count)
        ]
        return self.info

    def upsert(self, *rows: Row) -> None:
        self.change([("upsert", row) for row in rows])

    def delete(self, *keys: Row) -> None:
        self.change([("delete", key) for key in keys])

    def change(self, changes: Sequence[Change], columns: Sequence[str] | None = None) -> None:
        """Apply changes in order; each bucket's go to its log as one batch."""
        by_bucket: dict[int, list[Change]] = defaultdict(list)
        if changes:
            for bucket, change in zip(self._buckets_of(changes), changes, strict=True):
                by_bucket[bucket].append(change)
        for bucket, members in by_bucket.items():
            entries = self.buckets[bucket].apply(members, columns)
            if entries:
                self.service.append(self.PATH, bucket, self._batch(entries))

    def _buckets_of(self, changes: Sequence[Change]) -> list[int]:
        key = self.info.descriptor.effective_bucket_key
        schema = self.info.schema.select(key, table=self.PATH).to_arrow()
        columns = [pa.array([row[f.name] for _, row in changes], f.type) for f in schema]
        keys = pa.RecordBatch.from_arrays(columns, schema=schema)
        return buckets_for_rows(keys, key, self.info.bucket_count).tolist()

    def _batch(self, entries: Sequence[Entry]) -> pa.RecordBatch:
        schema = self.info.log_schema
        columns = [
            pa.array([entry.row[name] for entry in entries], schema.field(name).type)
            for name in self.info.schema.names
        ]
        columns += [
            pa.array([entry.change_type for entry in entries], pa.int8()),
            pa.array([entry.retracts for entry in entries], pa.int64()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    @property
    def rows(self) -> dict[Any, Row]:
        """What the table holds, by key."""
        return {key: row for model in self.buckets for key, (_, row) in model.rows.items()}

    @property
    def live(self) -> list[Any]:
        """(bucket, offset, row) of what the table holds, comparable."""
        return sorted(
            (bucket, offset, identity(row))
            for bucket, model in enumerate(self.buckets)
            for offset, row in model.rows.values()
        )

    def in_lake(self, snapshot_id: int | None = None) -> list[Any]:
        """What `live` was when `snapshot_id` was tiered, as stock pyiceberg reads the lake."""
        if self.service.table_state(self.PATH).lake.snapshot_id is None:
            return []
        found = self.lake_table(self.PATH).scan(snapshot_id=snapshot_id).to_arrow().to_pylist()
        return sorted(_addressed(row) for row in found)

    @property
    def changes(self) -> list[Any]:
        """(bucket, offset, change type, row) of every change there ever was, comparable."""
        return sorted(
            (bucket, entry.offset, CHANGE_TYPE_NAMES[entry.change_type], identity(entry.row))
            for bucket, model in enumerate(self.buckets)
            for entry in model.log
        )

    def history(self) -> list[Any]:
        """What `changes` was at the last round, as stock pyiceberg reads the full history."""
        found = self.lake_table(f"{self.PATH}$changelog").scan().to_arrow().to_pylist()
        return sorted(
            (bucket, offset, row_type, row)
            for line in found
            for row_type in [line.pop("__change_type")]
            for bucket, offset, row in [_addressed(line)]
        )

    @property
    def lag(self) -> int:
        """How many changes the service thinks are not in the lake."""
        positions = self.service.table_state(self.PATH).positions.values()
        return sum(p.high_watermark - p.tiered_offset for p in positions)

    def catch_up(self) -> None:
        """Run rounds until the lake has everything."""
        while self.lag:
            self.tier(self.PATH)


def _addressed(row: Mapping[str, Any]) -> Any:
    values = dict(row)
    values.pop("__timestamp")
    return values.pop("__bucket"), values.pop("__offset"), identity(values)
