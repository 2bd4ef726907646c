"""A tree says of every file what a plain model of the directory has, from any checkpoint on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
)
from streamhouse.storage_service.ownership.journal.tree import (
    FileAtPlace,
    JournalTree,
    Packed,
    TreeFile,
)


@dataclass
class Model:
    """A directory as a plain dict of bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Append(path, position, data):
                assert len(self.files[path]) == position
                self.files[path] += bytes(data)
            case Replace(path, data):
                self.files[path] = bytes(data)
            case Remove(path):
                self.files.pop(path, None)
            case MakeDirectory(path):
                parts = path.split("/")
                self.directories |= {"/".join(parts[: n + 1]) for n in range(len(parts))}
            case RemoveTree(path):
                self.directories = {d for d in self.directories if not is_in(d, path)}
                self.files = {f: b for f, b in self.files.items() if not is_in(f, path)}
            case Move(source, target):
                if source not in self.directories:
                    return
                self.apply(RemoveTree(target))

                def moved(path: str) -> str:
                    return target + path[len(source) :] if is_in(path, source) else path

                self.directories = {moved(d) for d in self.directories}
                self.files = {moved(f): b for f, b in self.files.items()}


def is_in(path: str, directory: str) -> bool:
    return (path + "/").startswith(directory + "/")


TABLES = ("tables/1", "tables/2", "tables/1.dropped", "tables/2.given-up")
LOGS = ("00000000000000000000.log", "00000000000000000007.log")


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Return operations that a service could have recorded."""
    model, operations = Model(), list[Operation]()
    for _ in range(draw(st.integers(1, 25))):
        operation = draw(next_operations(model))
        model.apply(operation)
        operations.append(operation)
    return operations


@st.composite
def next_operations(draw: st.DrawFn, model: Model) -> Operation:
    buckets = sorted(d for d in model.directories if "/bucket-" in d)
    logs = sorted(f for f in model.files if f.endswith(".log"))
    kinds = ["directory", "drop", "move"]
    kinds += ["append"] * 6 * bool(logs)
    kinds += ["replace"] * 3 * bool(buckets) + ["log"] * 2 * bool(buckets)
    kinds += ["remove"] * bool(model.files)
    data = draw(st.binary(max_size=6))
    match draw(st.sampled_from(kinds)):
        case "append":
            path = draw(st.sampled_from(logs))
            return Append(path, len(model.files[path]), data)
        case "log":
            bucket, name = draw(st.sampled_from(buckets)), draw(st.sampled_from(LOGS))
            return Replace(f"{bucket}/{name}", data)
        case "replace":
            bucket = draw(st.sampled_from(buckets))
            where = [f"{bucket}/{'0' * 20}.index", f"{bucket.rpartition('/')[0]}/table.json"]
            return Replace(draw(st.sampled_from([*where, "service.json"])), data)
        case "remove":
            return Remove(draw(st.sampled_from(sorted(model.files))))
        case "move":
            source, target = draw(st.permutations(TABLES))[:2]
            return Move(source, target)
        case "drop":
            return RemoveTree(draw(st.sampled_from(TABLES)))
        case _:
            return MakeDirectory(
                f"{draw(st.sampled_from(TABLES))}/bucket-{draw(st.sampled_from('01'))}"
            )


def assert_same(tree: JournalTree, model: Model) -> None:
    found = {file.path: (file.length, file.crc32c) for file in tree}
    assert found == {path: (len(data), crc32c(data)) for path, data in model.files.items()}
    # A tree knows the parents of its files.
    assert model.directories <= tree.directories
    tree.check_whole()


@given(histories())
def test_the_tree_has_the_files_of_the_directory(history: list[Operation]) -> None:
    tree, model = JournalTree(), Model()

    for number, operation in enumerate(history):
        tree.apply(operation, place=(1, 1, number) if number % 2 else None)
        model.apply(operation)

        assert_same(tree, model)
        assert all(file.length == sum(p.length for p in file.pieces) for file in tree)


@given(histories(), st.data())
def test_any_fuzzy_checkpoint_and_what_came_after_give_the_same_tree(
    history: list[Operation], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(history)), label="place")
    read_at = st.integers(place, len(history))
    live, model = JournalTree(), Model()
    for operation in history[:place]:
        live.apply(operation)
        model.apply(operation)
    wanted = [FileAtPlace.of(file) for file in live]
    times = {at.path: data.draw(read_at, label=f"when {at.path} is read") for at in wanted}
    restored = JournalTree()
    for path in live.directories:
        restored.add_directory(path)

    for now in range(place, len(history) + 1):
        for at in wanted:
            if times[at.path] == now:
                restored.add_file(read_now(at, model))
        if now < len(history):
            live.apply(history[now])
            model.apply(history[now])
    for operation in history[place:]:
        restored.apply(operation)

    assert_same(restored, model)
    assert_same(live, model)


def read_now(at: FileAtPlace, model: Model) -> TreeFile:
    """Read a file for a checkpoint, from a directory that is further than the checkpoint."""
    if not at.is_there:
        return at.left_out()
    prefix = model.files[at.file.path][: at.length]
    assert (len(prefix), crc32c(prefix)) == (at.length, at.crc32c)
    packed = Packed("pack", 0, at.length, at.crc32c)
    return TreeFile(at.path, at.length, at.crc32c, [packed])


LOG = f"tables/1/bucket-0/{LOGS[0]}"


@pytest.mark.parametrize(
    "operation",
    [
        Append(LOG, 2, b"x"),
        Append(LOG, 4, b"x"),
        Append(LOG.replace("bucket-0", "bucket-1"), 0, b"x"),
        Replace("../service.json", b"x"),
        Move("tables/1", "tables/1"),
        Move("tables/1", "tables/1/bucket-0"),
        Move("tables/1/bucket-0", "tables/2"),
        Move("tables/1", "tables"),
    ],
)
def test_an_operation_that_does_not_follow_is_damage(operation: Operation) -> None:
    tree = JournalTree()
    tree.apply(MakeDirectory("tables/1/bucket-0"))
    tree.apply(Replace(LOG, b"abc"))

    with pytest.raises(CorruptDataError):
        tree.apply(operation)


def test_a_file_left_out_that_no_operation_explains_is_damage() -> None:
    tree = JournalTree()
    tree.add_file(TreeFile(LOG, is_left_out=True))

    tree.apply(Append(LOG, 40, b"of what was replaced later"))

    with pytest.raises(CorruptDataError, match="left out"):
        tree.check_whole()
