"""A directory that follows a journal has the files of the tree of the same operations."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal._followed_directory import FollowedDirectory
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
)
from streamhouse.storage_service.ownership.journal.tree import JournalTree

_TABLES = ("tables/1", "tables/2", "tables/1.dropped", "tables/2.given-up")
_LOG = f"tables/1/bucket-0/{'0' * 20}.log"


@pytest.mark.parametrize("seed", range(30))
def test_the_directory_has_the_files_of_the_tree(tmp_path: Path, seed: int) -> None:
    """Also where it is closed, as by a restart, in between."""
    random, tree = Random(seed), JournalTree()
    followed = FollowedDirectory(tmp_path)
    for _ in range(60):
        operations = [_next(random, tree) for _ in range(random.randint(1, 2))]
        followed.apply(operations)
        assert _files(tmp_path) == {file.path: (file.length, file.crc32c) for file in tree}
        if random.random() < 0.2:
            followed.sync()
            followed.close()
            followed = FollowedDirectory(tmp_path)
    followed.sync()
    followed.close()

    assert _files(tmp_path) == {file.path: (file.length, file.crc32c) for file in tree}


def _next(random: Random, tree: JournalTree) -> Operation:
    """Return an operation that was applied to the tree, and that a service could have recorded."""
    operation = _draw(random, tree)
    tree.apply(operation)
    return operation


def _draw(random: Random, tree: JournalTree) -> Operation:
    files = [file.path for file in tree]
    logs = [path for path in files if path.endswith(".log")]
    data = random.randbytes(random.randint(0, 9))
    match random.randint(0, 11):
        case 0:
            return MakeDirectory(f"{random.choice(_TABLES)}/bucket-0")
        case 1:
            return RemoveTree(random.choice(_TABLES))
        case 2:
            return Move(*random.sample(_TABLES, 2))
        case 3 if files:
            return Remove(random.choice(files))
        case 4 | 5:
            name = random.choice([f"{'0' * 20}.log", f"{'0' * 20}.index", "durable.mark"])
            return Replace(f"{random.choice(_TABLES)}/bucket-0/{name}", data)
        case _ if logs:
            file = tree.get(random.choice(logs))
            assert file is not None
            return Append(file.path, file.length, data)
        case _:
            return Replace("service.json", data)


def _files(root: Path) -> dict[str, tuple[int, int]]:
    return {
        path.relative_to(root).as_posix(): (path.stat().st_size, crc32c(path.read_bytes()))
        for path in root.rglob("*")
        if path.is_file()
    }


def test_who_has_files_of_a_directory_open_is_told_before_it_goes(tmp_path: Path) -> None:
    left: list[str] = []
    followed = FollowedDirectory(tmp_path, leave=left.append)

    changed = followed.apply(
        [Replace(_LOG, b"abc"), Move("tables/1", "tables/1.dropped"), RemoveTree("tables/2")]
    )

    assert "tables/1" in left
    assert changed == set()


@pytest.mark.parametrize(
    "operation",
    [
        Append(_LOG, 2, b"x"),
        Append(_LOG, 4, b"x"),
        Append(_LOG.replace("bucket-0", "bucket-1"), 0, b"x"),
        Replace("../service.json", b"x"),
        Move("tables/1", "tables/1"),
        Move("tables/1", "tables/1/bucket-0"),
        Move("tables/1/bucket-0", "tables/2"),
        Move("tables/1", "tables"),
    ],
)
def test_what_does_not_follow_changes_nothing(tmp_path: Path, operation: Operation) -> None:
    followed = FollowedDirectory(tmp_path)
    followed.apply([Replace(_LOG, b"abc")])
    before = _files(tmp_path)

    with pytest.raises(CorruptDataError):
        followed.apply([operation])

    assert _files(tmp_path) == before
    followed.close()
