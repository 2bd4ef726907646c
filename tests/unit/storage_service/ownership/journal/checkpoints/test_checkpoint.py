"""A checkpoint has every file as it was at its place, and uploads what is new only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from crc32c import crc32c

from streamhouse.core.errors import StorageFailedError
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import (
    CheckpointTaker,
    TreeAtPlace,
)
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import KeyCopy, KeyPacker
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import (
    Manifest,
    decode_manifest,
)
from streamhouse.storage_service.ownership.journal.checkpoints.packs import read_packed
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    Operation,
    Remove,
    Replace,
)
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectEntry
from streamhouse.storage_service.ownership.journal.tree import (
    FileAtPlace,
    JournalTree,
    Packed,
    TreeFile,
)

NAMES = ShardNames()
LOG = "tables/1/bucket-0/00000000000000000000.log"
STATE = "tables/1/table.json"
MARK = "tables/1/bucket-0/durable.mark"


class Recorded:
    """A tree beside a directory; each operation is an object of its own, stored at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tree = JournalTree()
        self.position = 0
        self.after_place: list[Operation] = []
        """What is done as soon as a place was chosen."""

    def do(self, operation: Operation, *, is_done: bool = True) -> None:
        self.tree.apply(operation)
        self.position += 1
        if is_done:
            self.finish(operation)

    def finish(self, operation: Operation) -> None:
        """Do it on the disk."""
        assert isinstance(operation, Append | Replace | Remove)
        path = self.directory / operation.path
        path.parent.mkdir(parents=True, exist_ok=True)
        match operation:
            case Append(_, _, data):
                path.write_bytes(path.read_bytes() + bytes(data))
            case Replace(_, data):
                path.write_bytes(data)
            case Remove():
                path.unlink()

    def at_place(self) -> TreeAtPlace:
        files = [FileAtPlace.of(file) for file in self.tree]
        at = TreeAtPlace(self.position, files, self.tree.directories)
        for operation in self.after_place:
            self.do(operation)
        return at

    def packed(self, files: Iterable[tuple[FileAtPlace, Sequence[Packed]]]) -> None:
        for at, pieces in files:
            if at.is_there:
                at.file.pack(pieces, at.crc32c)

    @property
    def recorded_position(self) -> int:
        return self.position

    def wait_stored(self, position: int) -> None:
        assert position <= self.position

    def place_of(self, position: int) -> tuple[Place, int]:
        return Place(1, position + 1), 0


class World:
    def __init__(self, root: Path) -> None:
        self.directory = root / "data"
        self.directory.mkdir()
        self.recorded = Recorded(self.directory)
        self.store = FileObjectStore(root / "store")
        self.copies: list[KeyCopy] = []
        self.taker = self.new_taker()

    def new_taker(self, known: Manifest | None = None) -> CheckpointTaker:
        return CheckpointTaker(
            directory=self.directory,
            store=self.store,
            names=NAMES,
            service_id="s",
            epoch=2 if known else 1,
            recorded=self.recorded,
            copy_keys=lambda staging, known: self.copies,
            packs=dict(known.packs) if known else {},
            keys=KeyPacker(known.key_rows if known else ()),
            sleep=lambda seconds: None,
        )

    def take(self) -> Manifest:
        """Take a checkpoint; return it as the store has it."""
        taken = self.taker.take()
        assert taken is not None
        data = self.store.get(NAMES.checkpoint(taken.place), bytes_max=1 << 20)
        return decode_manifest(bytes(data), where="it")

    def packs(self) -> list[ObjectEntry]:
        return self.store.list_objects(NAMES.packs)

    def read(self, file: TreeFile) -> bytes:
        pieces = [piece for piece in file.pieces if isinstance(piece, Packed)]
        data = b"".join(bytes(read_packed(self.store, NAMES, [piece])[0]) for piece in pieces)
        assert (len(data), crc32c(data)) == (file.length, file.crc32c)
        return data


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.recorded.do(Replace(LOG, b"head"))
    world.recorded.do(Append(LOG, 4, b"rows"))
    world.recorded.do(Replace(STATE, b"{}"))
    return world


def content(world: World, manifest: Manifest) -> dict[str, bytes | None]:
    return {f.path: None if f.is_left_out else world.read(f) for f in manifest.tree}


def test_every_file_is_as_it_was_at_the_place(world: World) -> None:
    manifest = world.take()

    assert content(world, manifest) == {LOG: b"headrows", STATE: b"{}"}
    assert (manifest.place, manifest.stored_until) == (Place(1, 4), Place(1, 4))


def test_a_later_checkpoint_uploads_what_is_new_only(world: World) -> None:
    world.take()
    before = {entry.key for entry in world.packs()}
    world.recorded.do(Append(LOG, 8, b"more"))

    manifest = world.take()

    assert content(world, manifest) == {LOG: b"headrowsmore", STATE: b"{}"}
    new = [entry.size_bytes for entry in world.packs() if entry.key not in before]
    assert new == [len(b"more")]


def test_nothing_new_is_no_checkpoint(world: World) -> None:
    world.take()

    assert world.taker.take() is None


def test_what_is_removed_while_it_is_read_is_left_out_by_name(world: World) -> None:
    world.recorded.after_place = [Remove(STATE)]

    manifest = world.take()

    assert content(world, manifest) == {LOG: b"headrows", STATE: None}
    assert manifest.stored_until > manifest.place


def test_a_file_whose_new_name_is_late_is_waited_for(world: World) -> None:
    late = Replace(STATE, b"[1]")
    world.recorded.do(late, is_done=False)
    world.taker.sleep = lambda seconds: world.recorded.finish(late)

    assert content(world, world.take())[STATE] == b"[1]"


def test_a_damaged_file_never_becomes_the_truth(world: World) -> None:
    (world.directory / LOG).write_bytes(b"headrowz")

    with pytest.raises(StorageFailedError, match="is not what was written"):
        world.taker.take()

    assert not world.store.list_objects(NAMES.checkpoints)


def test_a_mark_is_taken_as_it_was_journalled(world: World) -> None:
    world.recorded.do(Replace(MARK, b"slot"))
    (world.directory / MARK).write_bytes(b"overwritten in place")

    assert content(world, world.take())[MARK] == b"slot"


def test_a_pack_that_is_mostly_dead_is_written_again(world: World) -> None:
    world.recorded.do(Replace(STATE, bytes(1_000)))
    first = world.take()
    world.recorded.do(Replace(STATE, b"{}"))

    manifest = world.take()

    assert not set(first.packs) & set(manifest.packs)
    assert content(world, manifest) == {LOG: b"headrows", STATE: b"{}"}


def test_many_small_packs_become_one(world: World) -> None:
    manifest = world.take()
    for number in range(40):
        world.recorded.do(Append(LOG, 8 + number, b"x"))
        manifest = world.take()

    assert len(manifest.packs) < 20
    assert content(world, manifest)[LOG] == b"headrows" + b"x" * 40


def test_rows_by_key_are_uploaded_once(world: World, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "000001.sst").write_bytes(b"big" * 1_000)
    (rows / "CURRENT").write_bytes(b"a")
    world.copies = [KeyCopy("tables/1/bucket-0", 12, rows)]
    first = world.take()
    size = sum(entry.size_bytes for entry in world.packs())
    (rows / "CURRENT").write_bytes(b"b")
    world.recorded.do(Append(LOG, 8, b"m"))

    second = world.take()
    # Another process knows the files by their content.
    world.taker = world.new_taker(second)
    world.recorded.do(Append(LOG, 9, b"n"))
    third = world.take()

    assert sum(entry.size_bytes for entry in world.packs()) == size + 3
    for manifest, current in ((first, b"a"), (second, b"b"), (third, b"b")):
        (found,) = manifest.key_rows
        assert found.applied_offset == 12
        data = {
            key.name: b"".join(bytes(read_packed(world.store, NAMES, [p])[0]) for p in key.pieces)
            for key in found.files
        }
        assert data == {"000001.sst": b"big" * 1_000, "CURRENT": current}


def test_attempts_that_fail_leave_nothing_in_the_store(tmp_path: Path) -> None:
    """A damaged file fails each of them: nothing would ever be trimmed."""
    world = World(tmp_path)
    world.taker.pack_bytes_max = 100
    for bucket in range(3):
        world.recorded.do(Replace(f"tables/1/bucket-{bucket}/{0:020d}.log", b"x" * 90))
    world.recorded.do(Replace("tables/2/table.json", b"right"))
    (world.directory / "tables/2/table.json").write_bytes(b"wrong")

    for _ in range(3):
        with pytest.raises(StorageFailedError):
            world.taker.take()

    assert world.packs() == []
    (world.directory / "tables/2/table.json").write_bytes(b"right")
    world.take()
    assert len(world.packs()) == 3


class _Vanishing:
    """A file of a tree that is removed once it was looked at."""

    version = 1

    def __init__(self) -> None:
        self._paths = [STATE]

    @property
    def path(self) -> str:
        return self._paths.pop() if self._paths else ""


class _VanishingRecorded(Recorded):
    def at_place(self) -> TreeAtPlace:
        at = super().at_place()
        return at._replace(
            files=[replace(file, file=cast(TreeFile, _Vanishing())) for file in at.files]
        )


def test_a_file_that_is_removed_as_it_is_opened_is_left_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.taker.recorded = recorded = _VanishingRecorded(world.directory)
    recorded.do(Replace(STATE, b"state"))

    assert [file.is_left_out for file in world.take().tree] == [True]


class _CountingStore(FileObjectStore):
    """Counts what is uploaded as packs."""

    sent = 0

    def replace(self, key: str, data: Buffer) -> None:
        self.sent += len(data)
        super().replace(key, data)


def test_a_damaged_file_is_not_uploaded_at_every_look(world: World, tmp_path: Path) -> None:
    world.taker.store = store = _CountingStore(tmp_path / "counting")
    world.taker.pack_bytes_max = 10
    (world.directory / LOG).write_bytes(b"x" * 8)

    with pytest.raises(StorageFailedError):
        world.taker.take()

    assert store.sent <= 8
