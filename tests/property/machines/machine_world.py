"""What outlives machines that die (`mortal_machine.py`): what was acknowledged, and the lake."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa

from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.engine.keys.key_recovery import LakeBucket
from streamhouse.storage_service.engine.open_table import OpenTable
from tests.support.in_process_service import EVENTS

__all__ = [
    "BUCKETS",
    "Change",
    "LakeOf",
    "Rows",
    "Staged",
    "World",
    "by_bucket",
    "differing",
    "folded",
    "is_less",
    "short",
    "wide",
]

BUCKETS: Final = 2
_WORLD: Final = "world.pickle"

Rows: TypeAlias = dict[str, Any]
"""What a table must have: ids by bucket, or names by id."""


@dataclass
class Change:
    """What is on its way: what it does to which table, and what it may lead to."""

    kind: str
    table: str
    given: Any
    after: Rows


@dataclass
class Staged:
    """An open transaction, and what it leads to once it is committed."""

    table: str
    parts: list[str]
    rows: Any
    is_overwrite: bool


@dataclass
class World:
    """See the module. `facts` are those of each table that its rows do not say."""

    rows: Rows = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    transactions: dict[str, Staged] = field(default_factory=dict)
    lake: dict[tuple[int, int], tuple[int, dict[int, tuple[int, str]]]] = field(
        default_factory=dict
    )
    change: Change | None = None
    next_number: int = 0
    ahead_us: int = 0
    sequences: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def load(root: Path) -> World:
        """Return what is known so far."""
        path = root / _WORLD
        world = pickle.loads(path.read_bytes()) if path.exists() else World()
        assert isinstance(world, World)
        return world

    def save(self, root: Path) -> None:
        """Let it outlive this machine."""
        path = root / _WORLD
        path.with_suffix(".tmp").write_bytes(pickle.dumps(self))
        path.with_suffix(".tmp").replace(path)

    def number(self) -> int:
        """Return a number that nothing had before."""
        self.next_number += 1
        return self.next_number


class LakeOf:
    """The rows by key as the lake has them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, table: TableInfo, lake: LakeState, bucket: int) -> LakeBucket:
        end, rows = self._world.lake[table.table_id, bucket]
        assert lake.tiered_offsets.get(bucket, 0) <= end
        schema = table.schema.to_arrow().append(pa.field("__offset", pa.int64(), nullable=False))
        lines = [{"id": i, "name": n, "__offset": v} for i, (v, n) in rows.items()]
        return LakeBucket(end, iter([pa.RecordBatch.from_pylist(lines, schema=schema)]))


def wide(ids: list[int]) -> pa.RecordBatch:
    """Return rows of which a few hundred fill a segment."""
    return pa.record_batch([pa.array(ids, pa.int64()), ["x" * 900] * len(ids)], schema=EVENTS)


def by_bucket(names: dict[int, str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for bucket in range(BUCKETS):
        ids = [number for number in names if number % BUCKETS == bucket]
        if ids:
            columns = [pa.array(ids, pa.int64()), [names[number] for number in ids]]
            yield bucket, pa.record_batch(columns, schema=EVENTS)


def folded(
    table: OpenTable, bucket: int, before: tuple[int, dict[int, tuple[int, str]]], end: int
) -> tuple[int, dict[int, tuple[int, str]]]:
    """Return the rows that a changelog makes of those at an earlier offset."""
    start, rows = before[0], dict(before[1])
    if start == end:
        return before
    for frame in table.tablets[bucket].read(start, bytes_max=1 << 30):
        batch = pa.ipc.read_record_batch(
            pa.py_buffer(frame.payload), table.info.log_schema_of(frame.schema_id)
        )
        for offset, line in enumerate(batch.to_pylist(), frame.base_offset):
            if start <= offset < end and line["__change_type"] in (INSERT, UPDATE_AFTER):
                rows[line["id"]] = (offset, line["name"])
            elif start <= offset < end and line["__change_type"] == DELETE:
                del rows[line["id"]]
    return end, rows


def is_less(shown: Any, before: Any) -> bool:
    """Whether only rows are gone: from the beginning of a log, or whatever keys."""
    if isinstance(before, dict):
        return isinstance(shown, dict) and shown.items() <= before.items()
    return all(
        rows == former[len(former) - len(rows) :]
        for rows, former in zip(shown, before, strict=True)
    )


def differing(shown: Rows, wanted: Rows) -> str:
    names = [n for n in shown.keys() | wanted.keys() if shown.get(n) != wanted.get(n)]
    return short({name: (shown.get(name), wanted.get(name)) for name in names})


def short(what: object) -> str:
    """Say it without the padding."""
    return re.sub("y+", "", repr(what))
