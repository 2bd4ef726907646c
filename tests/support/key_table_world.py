"""A primary key table `db.t`, and what it must hold: a dict of rows a bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES, INSERT, UPDATE_AFTER
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.core.model.table import TableInfo
from tests.support.kv_model import Change, Entry, KvModel, identity
from tests.support.union_world import UnionWorld

__all__ = ["KEY_SCHEMA", "Address", "KeyTableWorld", "Moment"]

KEY_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("amount", pa.float64()),
    ]
)

Row = dict[str, Any]
Address = tuple[int, int]
"""(bucket, offset)"""


@dataclass(frozen=True)
class Moment:
    """When a batch of changes came, and where each bucket's changelog ended then."""

    timestamp_us: int
    ends: dict[int, int]


class KeyTableWorld:
    """Each bucket has a model, which makes the changelog that goes into the log, line by line.

    Closed by `with`.
    """

    PATH = UnionWorld.PATH

    def __init__(self, folder: Path, *, catalog: LakeCatalog | None = None) -> None:
        self.union = UnionWorld(folder, catalog=catalog)
        self.tiering = self.union.tiering
        self.moments: list[Moment] = []

    def __enter__(self) -> KeyTableWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.union.__exit__(*error)

    def create_key_table(
        self,
        schema: pa.Schema = KEY_SCHEMA,
        *,
        primary_key: Sequence[str] = ("id",),
        bucket_count: int = 1,
        **more: Any,
    ) -> TableInfo:
        """Create the table; `more` is what `TieringWorld.create_table` takes."""
        self.info = self.tiering.create_table(
            self.PATH, schema, primary_key=primary_key, bucket_count=bucket_count, **more
        )
        rules = self.info.descriptor.merge_rules()
        key = self.info.descriptor.primary_key
        self.buckets = [KvModel(self.info.schema, key, rules) for _ in range(bucket_count)]
        return self.info

    def upsert(self, *rows: Row, bucket: int | None = None) -> None:
        """Upsert rows, each into its own bucket or all into the one that is named."""
        self._change_in(bucket, [("upsert", row) for row in rows])

    def delete(self, *keys: Row, bucket: int | None = None) -> None:
        """Delete rows, each from its own bucket or all from the one that is named."""
        self._change_in(bucket, [("delete", key) for key in keys])

    def change(self, changes: Sequence[Change], columns: Sequence[str] | None = None) -> None:
        """Apply changes in order; each bucket's go to its log as one batch."""
        by_bucket: dict[int, list[Change]] = defaultdict(list)
        if changes:
            for bucket, change in zip(self._buckets_of(changes), changes, strict=True):
                by_bucket[bucket].append(change)
        for bucket, members in by_bucket.items():
            self.write(bucket, members, columns)

    def write(
        self, bucket: int, changes: Sequence[Change], columns: Sequence[str] | None = None
    ) -> None:
        """Apply changes to one bucket as one batch."""
        entries = self.buckets[bucket].apply(changes, columns)
        if entries:
            service = self.tiering.service
            service.append(self.PATH, bucket, self._batch(entries))
            ends = {bucket: len(model.log) for bucket, model in enumerate(self.buckets)}
            self.moments.append(Moment(service.now_ms * 1_000, ends))

    def _change_in(self, bucket: int | None, changes: Sequence[Change]) -> None:
        if bucket is None:
            self.change(changes)
        else:
            self.write(bucket, changes)

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

    def live_rows(self) -> dict[Address, Row]:
        """What the table holds: the row of each live version by its address."""
        return {
            (bucket, offset): row
            for bucket, model in enumerate(self.buckets)
            for offset, row in model.rows.values()
        }

    @property
    def live(self) -> list[Any]:
        """(bucket, offset, row) of `live_rows`, comparable."""
        return sorted((*address, identity(row)) for address, row in self.live_rows().items())

    def rows_at(self, ends: Mapping[int, int]) -> dict[Address, Row]:
        """What `live_rows` was when each bucket's changelog ended at `ends`."""
        found: dict[Address, Row] = {}
        for bucket, model in enumerate(self.buckets):
            entries = model.log[: ends[bucket]]
            retracted = {entry.retracts for entry in entries}
            found |= {
                (bucket, entry.offset): entry.row
                for entry in entries
                if entry.change_type in (INSERT, UPDATE_AFTER) and entry.offset not in retracted
            }
        return found

    def changelog(self) -> dict[Address, tuple[str, Row]]:
        """The change type and row of every change there ever was, by its address."""
        return {
            (bucket, entry.offset): (CHANGE_TYPE_NAMES[entry.change_type], entry.row)
            for bucket, model in enumerate(self.buckets)
            for entry in model.log
        }

    @property
    def changes(self) -> list[Any]:
        """(bucket, offset, change type, row) of `changelog`, comparable."""
        return sorted(
            (*address, kind, identity(row)) for address, (kind, row) in self.changelog().items()
        )

    def in_lake(self, snapshot_id: int | None = None) -> list[Any]:
        """What `live` was when `snapshot_id` was tiered, as stock pyiceberg reads the lake."""
        if self.tiering.service.table_state(self.PATH).lake.snapshot_id is None:
            return []
        table = self.tiering.lake_table(self.PATH)
        return sorted(
            _addressed(row) for row in table.scan(snapshot_id=snapshot_id).to_arrow().to_pylist()
        )

    def history(self) -> list[Any]:
        """What `changes` was at the last round, as stock pyiceberg reads the full history."""
        found = self.tiering.lake_table(f"{self.PATH}$changelog").scan().to_arrow().to_pylist()
        return sorted(
            (bucket, offset, row_type, row)
            for line in found
            for row_type in [line.pop("__change_type")]
            for bucket, offset, row in [_addressed(line)]
        )

    @property
    def lag(self) -> int:
        """How many changes the service thinks are not in the lake."""
        positions = self.tiering.service.table_state(self.PATH).positions.values()
        return sum(p.high_watermark - p.tiered_offset for p in positions)

    def catch_up(self) -> None:
        """Run rounds until the lake has everything."""
        while self.lag:
            self.tiering.tier(self.PATH)


def _addressed(row: Mapping[str, Any]) -> Any:
    values = dict(row)
    values.pop("__timestamp")
    return values.pop("__bucket"), values.pop("__offset"), identity(values)
