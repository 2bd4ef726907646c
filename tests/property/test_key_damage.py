"""Whatever happens to the files of rows by key, no wrong row, count or change is ever answered."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.examples import examples
from tests.support.in_process_service import open_manager

PATH: Final = TablePath.parse("damaged")
SCHEMA: Final = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
    ]
)
_BUCKETS: Final = 2
_PARTS: Final = 40
_IDS: Final = 50
Key = tuple[int, int]


def kv_directory(data_dir: Path, bucket: int) -> Path:
    """Return where the rows by key of a bucket are."""
    return data_dir / "tables" / "1" / f"bucket-{bucket}" / "kv"


@dataclass
class Expected:
    """The rows that were acknowledged: (part, id) -> text."""

    rows: dict[Key, str] = field(default_factory=dict)

    def copy(self) -> Expected:
        return Expected(dict(self.rows))


def _batch(rows: Sequence[tuple[Key, str]]) -> pa.RecordBatch:
    lines = [{"part": part, "id": i, "text": text} for (part, i), text in rows]
    return pa.RecordBatch.from_pylist(lines, schema=SCHEMA)


def _bucket_of(key: Key) -> int:
    # Writes are routed here: the bucket key is the column `part`.
    row = pa.RecordBatch.from_pylist([{"part": key[0]}], schema=pa.schema([SCHEMA.field("part")]))
    return int(buckets_for_rows(row, ("part",), _BUCKETS)[0])


_BUCKET_OF_PART: Final = {part: _bucket_of((part, 0)) for part in range(_PARTS + 1)}


async def _write(
    manager: TabletManager, table: OpenTable, keys: Sequence[Key], text: str | None
) -> dict[int, tuple[int, int]]:
    """Upsert the keys, or delete them if there is no text; return the offsets by bucket."""
    writes = []
    for bucket in range(_BUCKETS):
        own = [(key, text or "") for key in keys if _BUCKET_OF_PART[key[0]] == bucket]
        if own:
            operations = None if text else np.ones(len(own), dtype=np.int8)
            writes.append(KeyWrite(bucket, _batch(own), operations))
    appended = await manager.write_keys(table, writes, columns=None, writer_id=0)
    return dict(appended.ranges)


async def _changes(table: OpenTable, ranges: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    lines = []
    for bucket, (start, end) in ranges.items():
        offset = start
        while offset < end:
            for frame in table.tablet(bucket).read(offset, bytes_max=1 << 20):
                batch = pa.ipc.read_record_batch(pa.py_buffer(frame.payload), table.info.log_schema)
                first = frame.base_offset
                lines += batch.to_pylist()[max(start - first, 0) : end - first]
                offset = first + batch.num_rows
    return lines


def made_table(directory: Path) -> tuple[Path, Path, Expected]:
    """Make a data directory below `directory`; return it, an older copy of it, what it has."""

    async def make() -> Expected:
        expected = Expected()
        async with open_manager(directory / "live") as manager:
            table = await manager.create_table(
                TableDescriptor(
                    path=PATH,
                    schema=Schema.from_arrow(SCHEMA),
                    primary_key=("part", "id"),
                    bucket_key=("part",),
                    bucket_count=_BUCKETS,
                )
            )
            every = [(part, i) for part in range(_PARTS) for i in range(_IDS)]
            for number, keys in enumerate((every, every[::3], every[1::7])):
                text = f"{number} " + "x" * 60
                await _write(manager, table, keys, text)
                expected.rows |= dict.fromkeys(keys, text)
                gone = every[number::11]
                await _write(manager, table, gone, None)
                for key in gone:
                    expected.rows.pop(key, None)
                for bucket in table.key_buckets:
                    await table.key_writer.on_thread(bucket.rows.flush)
                if number == 1:
                    shutil.copytree(directory / "live", directory / "older")
            keys = every[5::13]
            await _write(manager, table, keys, "unflushed")
            expected.rows |= dict.fromkeys(keys, "unflushed")
            shutil.copytree(directory / "live", directory / "killed")
        return expected

    expected = asyncio.run(make())
    return directory / "killed", directory / "older", expected


async def _asked(judgements: list[Callable[[], None]]) -> int:
    """Run every judgement; return how many were refused because of damage."""
    refused = 0
    for judgement in judgements:
        try:
            judgement()
        except CorruptDataError as error:
            refused += _refused(error, "table 'default.damaged', bucket ")
    return refused


def _refused(error: CorruptDataError, sentence: str) -> int:
    assert sentence in error.message
    return 1


def judge(
    data_dir: Path, expected: Expected, *, recovery: KeyRecovery | None = None, **config: Any
) -> int:
    """Open the table and ask it everything; return how much was refused because of damage.

    Every answer must be what `expected` says, which follows the writes that are acknowledged.
    """

    async def scenario() -> int:
        async with open_manager(data_dir, recovery=recovery, is_strict=True, **config) as manager:
            table = manager.table(PATH)
            refused = await _asked(_reads(table, expected))
            refused += await _judge_writes(manager, table, expected)
            return refused + await _asked(_reads(table, expected))

    try:
        return asyncio.run(scenario())
    except CorruptDataError as error:
        return _refused(error, "table 'default.damaged' cannot be opened: ")


def _reads(table: OpenTable, expected: Expected) -> list[Callable[[], None]]:
    every = [(part, i) for part in range(_PARTS + 1) for i in range(_IDS)]
    buckets = table.key_buckets

    def many(keys: Sequence[Key]) -> None:
        asked = table.lookup.keys(_batch([(k, "") for k in keys]).select([0, 1]))
        found = table.lookup.rows(table.lookup.find(asked)).rows
        assert found.column("text").to_pylist() == [expected.rows.get(key) for key in keys]

    def one(key: Key) -> None:
        found = table.lookup.find(table.lookup.key({"part": key[0], "id": key[1]}))
        values = table.lookup.values(found)
        assert (values and values[-1]) == expected.rows.get(key)

    def prefix(part: int) -> None:
        asked = pa.RecordBatch.from_pylist([{"part": part}], schema=pa.schema([SCHEMA.field(0)]))
        rows = table.lookup.prefix_rows(asked, rows_max=1_000).rows.to_pylist()
        own = {key: text for key, text in expected.rows.items() if key[0] == part}
        assert {(row["part"], row["id"]): row["text"] for row in rows} == own

    def count() -> None:
        for bucket in buckets:
            bucket.check_usable()
        assert sum(bucket.row_count for bucket in buckets) == len(expected.rows)

    judged: list[Callable[[], None]] = [functools.partial(many, every), count]
    for part in (0, 3):
        judged.append(functools.partial(many, [key for key in every if key[0] == part]))
    judged += [functools.partial(prefix, part) for part in range(0, _PARTS + 1, 8)]
    judged += [functools.partial(one, key) for key in every[::211]]
    return judged


async def _judge_writes(manager: TabletManager, table: OpenTable, expected: Expected) -> int:
    """Upsert and delete keys that are there and keys that are not, of one part at a time."""
    refused = 0
    for part in (2, 9, 17, 33, _PARTS):
        keys = [(part, i) for i in range(0, _IDS, 4)]
        for text in ("rewritten", None):
            chosen = keys if text else keys[::2]
            there = [key for key in chosen if key in expected.rows]
            try:
                ranges = await _write(manager, table, chosen, text)
            except CorruptDataError as error:
                refused += _refused(error, "table 'default.damaged', bucket ")
                continue
            kinds = [line["__change_type"] for line in await _changes(table, ranges)]
            if text is None:
                assert kinds.count(DELETE) == len(there)
                for key in there:
                    del expected.rows[key]
            else:
                is_same = [key for key in there if expected.rows[key] == text]
                assert kinds.count(INSERT) == len(chosen) - len(there)
                assert kinds.count(UPDATE_AFTER) == len(there) - len(is_same)
                expected.rows |= dict.fromkeys(chosen, text)
    return refused


pytestmark = pytest.mark.slow

# All rows at hand, and next to none of them: then RocksDB is asked.
_BUDGETS = ({}, {"key_cache_bytes_max": 1, "key_memory_bytes_max": 1})


@functools.cache
def _made() -> tuple[Path, Path, Expected]:
    return made_table(Path(tempfile.mkdtemp(prefix="streamhouse-test-")))


def _files(data_dir: Path) -> list[Path]:
    """Return the files of the rows by key, those that hold rows most often."""
    found = sorted(p for b in (0, 1) for p in kv_directory(data_dir, b).iterdir() if p.is_file())
    return found + 4 * [path for path in found if path.suffix == ".sst"]


def _flip(path: Path, at: float, mask: int) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[int(at * len(data))] ^= mask
        path.write_bytes(data)


def _cut(path: Path, at: float, mask: int) -> None:
    path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])


def _zero(path: Path, at: float, mask: int) -> None:
    data = bytearray(path.read_bytes())
    start = int(at * len(data))
    data[start : start + mask * 8] = bytes(len(data[start : start + mask * 8]))
    path.write_bytes(data)


def _remove(path: Path, at: float, mask: int) -> None:
    path.unlink()


def _grow(path: Path, at: float, mask: int) -> None:
    path.write_bytes(path.read_bytes() + bytes([mask]) * int(1 + at * 500))


def _swap(path: Path, at: float, mask: int) -> None:
    """Exchange a file with one of its kind, of this bucket or the other."""
    others = [
        other
        for folder in path.parents[1].parent.glob("bucket-*/kv")
        for other in sorted(folder.glob("*" + (path.suffix or path.name.split("-")[0] + "*")))
        if other != path and other.is_file()
    ]
    if others:
        other = others[int(at * len(others))]
        mine = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(mine)


def _older(path: Path, at: float, mask: int) -> None:
    """Put the whole directory back as it was, or only this file."""
    older = _made()[1] / path.relative_to(path.parents[4])
    if mask % 2:
        shutil.rmtree(path.parent)
        shutil.copytree(older.parent, path.parent)
    elif older.exists():
        shutil.copyfile(older, path)


_MUTATIONS = (_flip, _flip, _flip, _cut, _zero, _remove, _grow, _swap, _older)


@settings(max_examples=examples(15))
@given(
    mutation=st.sampled_from(_MUTATIONS),
    which=st.floats(0, 1, exclude_max=True),
    at=st.floats(0, 1, exclude_max=True),
    mask=st.integers(0, 7).map(lambda bit: 1 << bit),
    budget=st.sampled_from(_BUDGETS),
)
def test_a_damaged_file_never_answers_wrong(
    mutation: object, which: float, at: float, mask: int, budget: dict[str, int]
) -> None:
    pristine, _, expected = _made()
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name) / "data"
        shutil.copytree(pristine, data_dir)
        files = _files(data_dir)
        mutation(files[int(which * len(files))], at, mask)  # type: ignore[operator]

        found = expected.copy()
        judge(data_dir, found, **budget)
        # The changelog has everything: met or not, the damage is gone by itself in the end.
        judge(data_dir, found, **budget)
        assert judge(data_dir, found, **budget) == 0
