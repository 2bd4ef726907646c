"""A table is made once for all tasks of a machine; each finds in it what its maker does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.connector.lookup._joined_batches import joined
from streamhouse.connector.lookup._key_rows import KeyRows, Keys
from streamhouse.connector.lookup._row_source import RowSource
from streamhouse.connector.lookup._shared_tables import SharedTables, shared_by_executor
from streamhouse.core.errors import UnavailableError
from tests.support.lookup_world import FakeTable, plan_of

COUNT: Final = 3_000
NUMBERS: Final = np.arange(COUNT)
KINDS: Final[dict[str, list[pa.Array]]] = {
    "close integers": [pa.array(NUMBERS)],
    "integers far apart": [pa.array(NUMBERS * 0x1E3779B97F4A7C1)],
    "short texts": [pa.array([f"k{i}" for i in NUMBERS])],
    "long texts": [pa.array([f"a long key {i}" * 2 for i in NUMBERS])],
    "two columns": [pa.array(NUMBERS % 50), pa.array([str(i) for i in NUMBERS])],
    "no rows": [pa.array([], pa.int64())],
}


def _made(arrays: list[pa.Array], *, has_runs: bool = False) -> KeyRows:
    names = pa.array([None if i % 7 == 0 else f"n{i}" for i in range(len(arrays[0]))], pa.string())
    rows = pa.RecordBatch.from_arrays([names], names=["name"])
    return KeyRows.complete(rows.schema, Keys(arrays), rows, has_runs=has_runs)


class _Cut(NamedTuple):
    """A cut at a place that is a number, after as many changes."""

    name: str
    make: Callable[[], KeyRows]
    form: str | None = None
    place: Any = None
    bring: Callable[[KeyRows, Any], KeyRows | None] = lambda table, place: table

    def since(self, place: Any) -> int | None:
        return None if place is None else max(int(self.place) - int(place), 0)

    def load(self) -> KeyRows:
        return self.make()

    def advance(self, table: KeyRows, place: Any) -> KeyRows | None:
        return self.bring(table, place)


def _once(directory: Path, name: str, make: Callable[[], KeyRows], **more: Any) -> KeyRows:
    return SharedTables(directory).load_once(_Cut(name, make, **more))


def _small(value: int = 5) -> KeyRows:
    return _made([pa.array([value])])


def _unmade() -> KeyRows:
    raise AssertionError("it is there")


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("has_runs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_the_same_to_whoever_reads_it(kind: str, has_runs: bool, tmp_path: Path) -> None:
    arrays = KINDS[kind]
    parts = [array.slice(0, len(array) // 2) for array in arrays] if has_runs else arrays
    runs = [pa.concat_arrays([array, part]) for array, part in zip(arrays, parts, strict=True)]
    made = _once(tmp_path, "t", lambda: _made(runs if has_runs else arrays, has_runs=has_runs))

    got = _once(tmp_path, "t", _unmade)

    asked = [
        pa.concat_arrays([array, KINDS[kind][0].slice(0, 0).cast(array.type)])
        if len(arrays) == 1
        else array
        for array in arrays
    ]
    numbers = got.find(Keys(asked))
    assert numbers.tolist() == made.find(Keys(asked)).tolist()
    assert (numbers > 0).all()
    assert [a.tolist() for a in got.runs(numbers)] == [a.tolist() for a in made.runs(numbers)]
    assert got.values.rows.equals(made.values.rows)
    others = Keys([array.slice(0, 9) for array in arrays[:-1]] + [_others(arrays[-1])])
    assert got.find(others).tolist() == [0] * len(others)


def _others(array: pa.Array) -> pa.Array:
    nine = range(9) if len(array) else range(0)
    text = pa.types.is_string(array.type)
    return pa.array([f"other {i}" if text else -5 - i for i in nine], array.type)


def test_whoever_comes_meanwhile_waits_for_the_one_who_makes_it(tmp_path: Path) -> None:
    is_making, may_end = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> KeyRows:
        made.append(1)
        is_making.set()
        assert may_end.wait(60)
        return _small()

    with ThreadPoolExecutor(3) as tasks:
        first = tasks.submit(_once, tmp_path, "t", make)
        assert is_making.wait(60)
        others = [tasks.submit(_once, tmp_path, "t", make) for _ in range(2)]
        # Another cut is nobody's to wait for.
        _once(tmp_path, "another", _small)
        may_end.set()
        tables = [task.result() for task in (first, *others)]

    assert len(made) == 1
    assert {table.values.rows.num_rows for table in tables} == {1}
    assert not [name for name in _names(tmp_path) if name.endswith(".part")]


def test_whoever_wants_a_later_cut_waits_too_and_begins_with_it(tmp_path: Path) -> None:
    is_making, may_end = threading.Event(), threading.Event()
    begun_with: list[Any] = []

    def make() -> KeyRows:
        is_making.set()
        assert may_end.wait(60)
        return _small()

    def bring(table: KeyRows, place: Any) -> KeyRows:
        begun_with.append(place)
        return table

    with ThreadPoolExecutor(2) as tasks:
        first = tasks.submit(_once, tmp_path, "cut 1", make, form="t", place=1)
        assert is_making.wait(60)
        later = tasks.submit(_once, tmp_path, "cut 2", _unmade, form="t", place=1, bring=bring)
        may_end.set()
        first.result()
        later.result()

    assert begun_with == [1]
    assert len(_names(tmp_path)) == 1


def test_where_making_fails_the_next_one_makes_it(tmp_path: Path) -> None:
    def fail() -> KeyRows:
        raise UnavailableError("away")

    with pytest.raises(UnavailableError, match="away"):
        _once(tmp_path, "t", fail)
    assert _names(tmp_path) == set()
    _once(tmp_path, "t", _small)
    _once(tmp_path, "t", _unmade)


def test_what_a_dead_task_left_is_written_over_or_swept(tmp_path: Path) -> None:
    _once(tmp_path, "t", _small)
    (whole,) = _names(tmp_path)
    (tmp_path / whole).rename(tmp_path / f"{whole}.part")
    (tmp_path / "other.part").write_bytes(b"half")

    _once(tmp_path, "t", _small)

    assert _names(tmp_path) == {whole}
    _once(tmp_path, "t", _unmade)


def test_few_tables_are_kept_and_none_for_long(tmp_path: Path) -> None:
    tables = SharedTables(tmp_path)
    for number in range(6):
        tables.load_once(_Cut(str(number), _small))
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_mtime - 1, path.stat().st_mtime - 1))
    assert len(_names(tmp_path)) == 4
    tables.load_once(_Cut("5", _unmade))

    late = SharedTables(tmp_path, clock=lambda: tmp_path.stat().st_mtime + 70)
    assert late.load_once(_Cut("5", lambda: _small(8))).find(Keys([pa.array([8])])).tolist() == [1]
    assert len(_names(tmp_path)) == 1


def test_without_a_place_for_it_each_task_makes_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked = SharedTables(tmp_path / "file" / "below")
    assert [blocked.load_once(_Cut("t", _small)).values.rows.num_rows for _ in range(2)] == [1, 1]

    _once(tmp_path, "t", _small)
    (whole,) = (path for path in tmp_path.iterdir() if path.name != "file")
    whole.write_bytes(b"no table")
    assert _once(tmp_path, "t", _small).values.rows.num_rows == 1


def test_a_damaged_file_is_not_used_nor_that_of_another_cut(tmp_path: Path) -> None:
    _once(tmp_path, "t", _small)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        got = _once(tmp_path, "t", lambda: _small(6))
        assert got.find(Keys([pa.array([6])])).tolist() == [1], place
    for size in range(0, len(whole), 5):
        path.write_bytes(whole[:size])
        got = _once(tmp_path, "t", lambda: _small(6))
        assert got.find(Keys([pa.array([6])])).tolist() == [1], size

    path.write_bytes(whole)
    _once(tmp_path, "another", _small)
    other = next(other for other in tmp_path.iterdir() if other != path)
    other.write_bytes(whole)
    got = _once(tmp_path, "another", lambda: _small(7))
    assert got.find(Keys([pa.array([7])])).tolist() == [1]


def test_where_others_may_write_nothing_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    _once(directory, "t", _small)
    assert _names(directory) == set()


def test_only_the_same_rows_of_the_same_cut_are_shared(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
    table = FakeTable(schema, ["id"], [{"id": i, "v": i} for i in range(50)])

    def task(**changes: Any) -> tuple[int, int]:
        plan = plan_of(table, given=["user"], **{"columns": ["v"], **changes})
        source = RowSource(plan, table, table, shared=SharedTables(tmp_path), key_count_min=5)
        batch = pa.RecordBatch.from_pydict({"user": pa.array(range(1, 50))})
        before = table.reads
        rows = pa.Table.from_batches(joined([batch], plan, source))
        return table.reads - before, sum(rows.column(1).to_pylist())

    table.name = "cut 1"
    assert [task(), task(), task(how="inner")] == [(1, 1225), (0, 1225), (0, 1225)]
    table.rows[(1,)]["v"] = 101
    table.name = "cut 2"
    assert [task(), task(columns=["id"])] == [(1, 1325), (1, 1225)]
    # A cut that cannot be told from others is read by each.
    table.name = None
    assert [task(), task()] == [(1, 1325), (1, 1325)]


def test_the_place_is_the_executors_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    assert shared_by_executor() is None
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    shared = shared_by_executor()
    assert shared is not None
    shared.load_once(_Cut("t", _small))
    assert _names(tmp_path) == {"streamhouse-lookup"}
    assert (tmp_path / "streamhouse-lookup").stat().st_mode & 0o777 == 0o700
