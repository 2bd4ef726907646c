"""Which packs the bytes of a file are in, for who has followed while others took checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import JournalObject, ObjectKind
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    Move,
    Operation,
    Replace,
)
from streamhouse.storage_service.ownership.journal.restore._followed_tree import FollowedTree
from streamhouse.storage_service.ownership.journal.tree import (
    Held,
    JournalTree,
    Local,
    Packed,
    TreeFile,
)

LOG = f"tables/1/bucket-0/{'0' * 20}.log"
MARK = "tables/1/bucket-0/durable.mark"
START = Place(2, 0)


def _manifest(place: Place, files: dict[str, bytes], *, applied: int = 0) -> Manifest:
    tree = JournalTree()
    for path, data in files.items():
        packed = Packed("00000002-000000000000", 0, len(data), crc32c(data))
        tree.add_file(TreeFile(path, len(data), crc32c(data), [packed]))
    return Manifest(
        service_id="mine",
        shard="0",
        place=place,
        applied=applied,
        stored_until=place,
        next_pack="00000002-000000000001",
        tree=tree,
        packs={"00000002-000000000000": 100},
        key_rows=(),
    )


def _followed(*objects: tuple[Operation, ...]) -> FollowedTree:
    tree = JournalTree()
    tree.apply(Replace(LOG, b"abc"))
    tree.apply(Replace(MARK, b"mark"))
    followed = FollowedTree(tree, start=START, manifest=None)
    for seq, operations in enumerate(objects, 1):
        followed.apply(
            JournalObject(
                kind=ObjectKind.OPERATIONS,
                place=Place(2, seq),
                nonce=b"",
                previous_checksum=0,
                checksum=0,
                size_bytes=0,
                journal=b"",
                operations=operations,
            )
        )
    return followed


def _pieces(followed: FollowedTree, manifest: Manifest | None, folder: Path, path: str) -> Any:
    (folder / MARK).parent.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_bytes(b"mark")
    file = followed.on(manifest, folder).get(path)
    assert file is not None
    return [type(piece) for piece in file.pieces], file.packed_length


@pytest.mark.parametrize(
    ("objects", "place", "pieces"),
    [
        # Appended to since the checkpoint.
        ([(Append(LOG, 3, b"d"),)], Place(2, 1), ([Packed, Local], 3)),
        # Replaced before and after it.
        ([(Replace(LOG, b"abc"),), (Append(LOG, 3, b"d"),)], Place(2, 2), ([Packed, Local], 3)),
        ([(Replace(LOG, b"abcd"),)], Place(2, 1), ([Local], 0)),
        # The checkpoint is of a time that was not followed.
        ([(Append(LOG, 3, b"d"),)], Place(1, 9), ([Local], 0)),
    ],
)
def test_packs_are_taken_for_what_is_surely_the_same(
    tmp_path: Path, objects: list[tuple[Operation, ...]], place: Place, pieces: Any
) -> None:
    followed = _followed(*objects)

    assert _pieces(followed, _manifest(place, {LOG: b"abc"}), tmp_path, LOG) == pieces


def test_operations_of_one_object_lie_on_both_sides_of_a_checkpoint(tmp_path: Path) -> None:
    followed = _followed((Replace(LOG, b"abc"), Append(LOG, 3, b"d")))

    for applied, pieces in ((0, [Local]), (1, [Packed, Local])):
        manifest = _manifest(Place(2, 1), {LOG: b"abc"}, applied=applied)
        assert _pieces(followed, manifest, tmp_path, LOG)[0] == pieces


def test_a_file_that_was_moved_is_another(tmp_path: Path) -> None:
    moved = LOG.replace("tables/1", "tables/1.dropped")
    followed = _followed((Move("tables/1", "tables/1.dropped"),), (Append(moved, 3, b"d"),))
    (tmp_path / "tables/1.dropped/bucket-0").mkdir(parents=True)
    (tmp_path / MARK.replace("tables/1", "tables/1.dropped")).write_bytes(b"mark")

    before = _manifest(Place(2, 1), {moved: b"abc"})
    after = _manifest(Place(2, 2), {moved: b"abc"})

    assert _pieces(followed, before, tmp_path, moved) == ([Local], 0)
    assert _pieces(followed, after, tmp_path, moved) == ([Packed, Local], 3)


def test_what_is_overwritten_in_its_place_is_held(tmp_path: Path) -> None:
    assert _pieces(_followed(), None, tmp_path, MARK) == ([Held], 0)
