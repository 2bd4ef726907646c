"""Whatever happens to the files of rows by key, no wrong row, count or change is ever answered."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.key_damage import Expected, judge, kv_directory, made_table

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
