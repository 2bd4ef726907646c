"""One thing in a data directory is damaged, lost, swapped or old: each table is right, or refused.

The directory has a log table, a primary key table, one that transactions load and overwrite, and a
quiet one; what was acknowledged of each is known. Whatever is done to one file or directory, no
table answers anything else, those that it does not concern are served, and nothing is removed.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.storage_service.operations.check_directory import check_directory
from tests.support.attacked_directory import (
    BUILD_STAGES,
    Acknowledged,
    Verdict,
    build,
    judge,
)
from tests.support.examples import examples

Choose = Callable[[int], int]
"""Returns a number from 0 to below what it is given: `Random(seed).randrange`, or hypothesis'."""


@dataclass(frozen=True)
class Attack:
    """What was done, in words, and to which files."""

    kind: str
    files: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.files)} {self.detail}".strip()


def state_files(data_dir: Path) -> list[str]:
    """Return every file of the directory that says something, by its name below it."""
    return sorted(
        str(path.relative_to(data_dir))
        for path in data_dir.rglob("*")
        if path.is_file() and path.name not in ("LOCK", "LOG") and path.suffix != ".tmp"
    )


def attack(
    data_dir: Path, choose: Choose, *, older: Sequence[Path] = (), files: Sequence[str] = ()
) -> Attack:
    """Damage one thing below `data_dir`; `older` are earlier versions of the whole directory.

    `files` narrows what may be hit; by default every file may.
    """
    hit = list(files) or state_files(data_dir)
    name = hit[choose(len(hit))]
    kinds = [_flip, _truncate, _remove, _swap, _remove_directory, _rename_directory]
    if older:
        kinds += [_older, _older]
    kind = kinds[choose(len(kinds))]
    return kind(data_dir, name, choose, hit, older)


def _flip(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    data = bytearray((data_dir / name).read_bytes())
    if not data:
        return _remove(data_dir, name, choose, hit, older)
    bit = choose(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    (data_dir / name).write_bytes(data)
    return Attack("flip", (name,), f"bit {bit}")


def _truncate(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    data = (data_dir / name).read_bytes()
    size = choose(len(data)) if data else 0
    (data_dir / name).write_bytes(data[:size])
    return Attack("truncate", (name,), f"to {size} of {len(data)} bytes")


def _remove(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    (data_dir / name).unlink()
    return Attack("remove", (name,))


def _swap(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Swap with a file of the same kind, as a mixed-up restore does."""
    alike = [other for other in hit if other != name and _kind(other) == _kind(name)]
    if not alike:
        return _remove(data_dir, name, choose, hit, older)
    other = alike[choose(len(alike))]
    first, second = (data_dir / name).read_bytes(), (data_dir / other).read_bytes()
    (data_dir / name).write_bytes(second)
    (data_dir / other).write_bytes(first)
    return Attack("swap", (name, other))


def _kind(name: str) -> str:
    path = Path(name)
    return path.suffix or path.name


def _remove_directory(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    directory = Path(name).parent
    if directory == Path():
        return _remove(data_dir, name, choose, hit, older)
    shutil.rmtree(data_dir / directory)
    return Attack("remove directory", (str(directory),))


def _rename_directory(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Flip one bit of a directory's name."""
    directory = Path(name).parent
    if directory == Path():
        return _flip(data_dir, name, choose, hit, older)
    letters = bytearray(directory.name.encode())
    place = choose(len(letters))
    letters[place] ^= 1 << choose(4)
    renamed = letters.decode("ascii", "replace")
    if "/" in renamed or renamed in (".", ".."):
        return _remove(data_dir, name, choose, hit, older)
    target = (data_dir / directory).with_name(renamed)
    if target.exists():
        return _remove(data_dir, name, choose, hit, older)
    (data_dir / directory).rename(target)
    return Attack("rename", (str(directory), target.name))


def _older(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Put an earlier version of the file in its place; without any it is removed."""
    now = (data_dir / name).read_bytes()
    versions = [
        folder
        for folder in older
        if (folder / name).is_file() and (folder / name).read_bytes() != now
    ]
    if not versions:
        return _remove(data_dir, name, choose, hit, older)
    folder = versions[choose(len(versions))]
    shutil.copyfile(folder / name, data_dir / name)
    return Attack("old version", (name,), f"of {folder.name}")


TABLE = {"1": "default.events", "2": "default.loads", "3": "other.quiet", "4": "default.users"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Acknowledged]:
    folder = tmp_path_factory.mktemp("built")
    return folder, asyncio.run(build(folder))


def _last(folder: Path) -> Path:
    return folder / f"stage-{BUILD_STAGES - 1}"


def _judged(
    built: tuple[Path, Acknowledged], damage: Callable[[Path], Attack | None]
) -> tuple[dict[str, Verdict], Attack | None, bool]:
    """Return the verdicts on a damaged copy, what was done, and whether a check calls it sound."""
    folder, known = built
    with tempfile.TemporaryDirectory(prefix="attacked-") as name:
        copy = Path(name) / "data"
        shutil.copytree(_last(folder), copy)
        done = damage(copy)
        before = set(state_files(copy))
        is_sound = check_directory(copy, lake_check=None).is_sound
        verdicts = asyncio.run(judge(copy, known))
        if verdicts[""].how == "refused":
            assert set(state_files(copy)) == before, "who does not start changes nothing"
        _check_nothing_removed(before, copy)
        return verdicts, done, is_sound


def _check_nothing_removed(before: set[str], copy: Path) -> None:
    """Segments, decisions and descriptors that were there still are."""
    kept = re.compile(r"\.log$|table\.json$|lake\.json$|service\.json$|truncated$|outcomes$")
    gone = {name for name in before - set(state_files(copy)) if kept.search(name)}
    assert not {name for name in gone if "/kv/" not in name}, gone


def _check(verdicts: dict[str, Verdict], done: Attack | None) -> None:
    for path, verdict in verdicts.items():
        assert verdict.how != "wrong", (str(done), path, verdict.why)
        if verdict.how == "refused":
            assert len(verdict.why) > 20, (str(done), path, verdict)
            assert "Traceback" not in verdict.why
    refused = {path for path, verdict in verdicts.items() if verdict.how == "refused"}
    if refused and done is not None:
        touched = {TABLE.get(Path(file).parts[1], "") for file in done.files if "/" in file}
        # Only what was hit is refused; service.json is everybody's.
        assert refused <= touched | {""}, (str(done), verdicts)


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=examples(10), deadline=None)
def test_whatever_is_done_to_one_thing_no_table_answers_wrong(
    built: tuple[Path, Acknowledged], seed: int
) -> None:
    folder, _ = built
    older = [folder / f"stage-{stage}" for stage in range(BUILD_STAGES - 1)]
    random = Random(seed)

    verdicts, done, _ = _judged(built, lambda copy: attack(copy, random.randrange, older=older))

    _check(verdicts, done)


def _change_type(data: Path) -> None:
    path = data / "tables" / "1" / "table.json"
    path.write_text(path.read_text().replace("bigint", "double"))


def _lose(*names: str) -> Callable[[Path], None]:
    def lose(data: Path) -> None:
        for name in names:
            for path in sorted(data.glob(f"tables/{name}")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return lose


CASES: list[tuple[str, Callable[[Path], None], str]] = [
    ("1", _change_type, "table.json is damaged: its checksum is wrong"),
    ("1", _lose("1/table.json"), "table.json is missing"),
    ("1", _lose("1/lake.json"), "lake.json is missing"),
    ("1", _lose("1/bucket-1"), "all segment files are missing"),
    ("4", _lose("4/bucket-0"), "all segment files are missing"),
    ("1", _lose("1/bucket-1/*.log"), "has no segment files"),
    ("2", _lose("2/bucket-0/00000000000000000000.*"), "retention has deleted rows below 0 only"),
    ("1", _lose("1/bucket-0/durable.mark"), "durable.mark is missing or damaged"),
    ("1", _lose("1/bucket-0/*.writers"), ".writers is missing or damaged"),
    ("2", _lose("2/transactions"), "outcomes is missing"),
    ("2", _lose("2/transactions/outcomes"), "outcomes is missing"),
    ("2", _lose("2/transactions/truncated"), "truncated is missing"),
    ("2", _lose("2/transactions/*.decision"), "a transaction whose decision is missing"),
    ("1", _lose("1"), "its directory"),
]


@pytest.mark.parametrize(("table", "damage", "sentence"), CASES)
def test_what_is_missing_or_changed_makes_its_table_unavailable(
    built: tuple[Path, Acknowledged],
    table: str,
    damage: Callable[[Path], None],
    sentence: str,
) -> None:
    verdicts, _, is_sound = _judged(built, lambda copy: damage(copy))

    verdict = verdicts.pop(TABLE[table])
    assert verdict.how == "refused"
    assert sentence in verdict.why
    assert {verdict.how for verdict in verdicts.values()} == {"right"}
    assert not is_sound


@pytest.mark.parametrize(
    ("name", "stage", "sentence"),
    [
        ("tables/1/table.json", 1, "table.json is an old version"),
        ("tables/1/lake.json", 1, "it is an old version"),
        ("tables/2/transactions/truncated", 0, ""),
        ("tables/2/transactions/truncated", 1, ""),
        ("tables/1/bucket-0/durable.mark", 1, "durable.mark is an old version"),
    ],
)
def test_an_old_version_is_noticed_where_it_would_answer_wrong(
    built: tuple[Path, Acknowledged], name: str, stage: int, sentence: str
) -> None:
    folder, _ = built
    old = folder / f"stage-{stage}" / name

    verdicts, _, _ = _judged(built, lambda copy: shutil.copyfile(old, copy / name) and None)

    path = TABLE[Path(name).parts[1]]
    assert verdicts[path].how == ("refused" if sentence else "right")
    assert sentence in verdicts.pop(path).why
    assert {verdict.how for verdict in verdicts.values()} == {"right"}
