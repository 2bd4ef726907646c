"""What of a local directory is kept beside its journal."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c

from streamhouse.storage_service.log.segments.segment_format import (
    LogIdentity,
    MarkFacts,
    encode_durable_mark,
    segment_path,
)
from streamhouse.storage_service.ownership.journal.operations import Replace
from streamhouse.storage_service.ownership.journal.restore._local_copy import compare
from streamhouse.storage_service.ownership.journal.tree import JournalTree, Packed, TreeFile

_PATH = "tables/1/bucket-0/durable.mark"


def mark(start_offset: int) -> bytes:
    facts = MarkFacts(durable_offset=start_offset, start_offset=start_offset, forgotten_offset=0)
    return encode_durable_mark(facts, identity=LogIdentity(table_id=1, bucket=0))


@pytest.mark.parametrize("is_same", [True, False])
def test_a_mark_of_another_moment_is_not_taken_for_that_of_the_journal(
    tmp_path: Path, is_same: bool
) -> None:
    """It ends with its own checksum: so those of all marks are one and the same."""
    tree = JournalTree()
    tree.apply(Replace(_PATH, mark(128)), place=(1, 1, 0))
    local = mark(128) if is_same else mark(0)
    (tmp_path / _PATH).parent.mkdir(parents=True)
    (tmp_path / _PATH).write_bytes(local)

    found = compare(tmp_path, tree, is_own=False, is_trusted=False)

    assert crc32c(mark(0)) == crc32c(mark(128))
    assert found.kept_lengths == ({} if is_same else {_PATH: 0})


def test_a_mark_whose_bytes_are_in_a_pack_is_made_anew(tmp_path: Path) -> None:
    tree, crc = JournalTree(), crc32c(mark(128))
    tree.add_file(TreeFile(_PATH, 64, crc, [Packed("pack", 0, 64, crc)]))
    (tmp_path / _PATH).parent.mkdir(parents=True)
    (tmp_path / _PATH).write_bytes(mark(0))

    found = compare(tmp_path, tree, is_own=False, is_trusted=False)

    assert found.kept_lengths == {_PATH: 0}


def test_the_mark_of_a_copy_that_was_taken_file_by_file_is_not_kept(tmp_path: Path) -> None:
    """Retention removed a segment between two of them: no log says that the copy is old."""
    tree = owned_log(tmp_path, first_offset=128)
    (tmp_path / _PATH).write_bytes(mark(0))

    found = compare(tmp_path, tree, is_own=True, is_trusted=True)

    assert found.kept_lengths == {_PATH: 0}


def test_a_mark_that_the_disk_damaged_is_fetched_again(tmp_path: Path) -> None:
    tree = owned_log(tmp_path, first_offset=0)
    (tmp_path / _PATH).write_bytes(bytes([*mark(0)[:20], mark(0)[20] ^ 1, *mark(0)[21:]]))

    found = compare(tmp_path, tree, is_own=True, is_trusted=True)

    assert found.kept_lengths == {_PATH: 0}


def test_a_mark_that_is_ahead_in_its_place_is_kept(tmp_path: Path) -> None:
    tree = owned_log(tmp_path, first_offset=0)
    (tmp_path / _PATH).write_bytes(mark(0) + mark(128))

    found = compare(tmp_path, tree, is_own=True, is_trusted=True)

    assert not found.kept_lengths


def owned_log(directory: Path, *, first_offset: int) -> JournalTree:
    """Make a log that begins there; return the journal's tree with the mark that says why."""
    log = segment_path(directory / _PATH, first_offset).name
    path = f"{_PATH.rpartition('/')[0]}/{log}"
    tree = JournalTree()
    tree.apply(Replace(path, b"frames"), place=(1, 1, 0))
    tree.apply(Replace(_PATH, mark(first_offset)), place=(1, 1, 1))
    (directory / path).parent.mkdir(parents=True)
    (directory / path).write_bytes(b"frames")
    return tree
