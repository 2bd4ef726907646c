"""The durable mark when the process dies in the middle of writing it."""

from __future__ import annotations

from pathlib import Path

from streamhouse.storage_service.log.durable_mark import MARK_NAME, DurableMark
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_format import LogIdentity, MarkFacts

_IDENTITY = LogIdentity(11, 0)


def _read(directory: Path) -> MarkFacts | None:
    return DurableMark.read(directory, identity=_IDENTITY, filesystem=LocalFilesystem())


def test_a_write_torn_anywhere_leaves_what_was_or_what_is(tmp_path: Path) -> None:
    # The kernel ends a write between two bytes when its process is killed and a page is missing.
    path = tmp_path / MARK_NAME
    mark = DurableMark(
        tmp_path, MarkFacts(1, 3, 2), identity=_IDENTITY, filesystem=LocalFilesystem()
    )
    for offset in (4174, 4354, 4355, 1 << 40):
        before, was = path.read_bytes(), mark.facts
        mark.advance(offset)
        after = path.read_bytes()
        assert _read(tmp_path) == mark.facts == MarkFacts(offset, 3, 2)

        for cut in range(len(after) + 1):
            # A file that grows is as long as what was written of it.
            path.write_bytes(after[:cut] + before[cut:])
            assert _read(tmp_path) in (was, mark.facts), cut
        path.write_bytes(after)
    mark.close()


def test_a_mark_damaged_in_both_slots_is_none(tmp_path: Path) -> None:
    path = tmp_path / MARK_NAME
    mark = DurableMark(tmp_path, MarkFacts(1), identity=_IDENTITY, filesystem=LocalFilesystem())
    mark.advance(2)
    mark.close()

    contents = bytearray(path.read_bytes())
    contents[63] ^= 1
    path.write_bytes(contents)
    assert _read(tmp_path) == MarkFacts(2)
    contents[-1] ^= 1
    path.write_bytes(contents)
    assert _read(tmp_path) is None


def test_an_empty_mark_is_none(tmp_path: Path) -> None:
    (tmp_path / MARK_NAME).write_bytes(b"")

    assert _read(tmp_path) is None
