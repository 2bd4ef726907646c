"""The files of a table in the store: they arrive byte by byte, or not at all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import CorruptDataError, UnavailableError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    Operation,
    Remove,
    Replace,
)
from streamhouse.storage_service.ownership.shards.entries import seal, unseal
from streamhouse.storage_service.ownership.shards.move_set import MoveSet, SentFiles, clear_moves
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket
from tests.support.memory_store import FaultyMemoryStore, MemoryStore

_TICKET = MoveTicket(
    move_id="0" * 32,
    path=TablePath("default", "t"),
    table_id=7,
    source="a",
    target="b",
    version=1,
)
_LOG = "tables/7/bucket-0/00000000000000000000.log"
_FILES = {
    _LOG: bytes(range(250)) * 4,
    "tables/7/bucket-0/durable.mark": b"m" * 100,
    "tables/7/bucket-1/00000000000000000000.log": b"header",
    "tables/7/table.json": b"{}",
    "tables/7/lake.json": b"",
}
_ROWS = "tables/7/bucket-0/kv"
_LISTS = [f"moves/a/{_TICKET.move_id}/{number:04d}/parts" for number in range(2)]


class _Journal:
    """Plays the operations of a journal."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def record(self, operation: Operation) -> int:
        match operation:
            case Replace(path, data):
                self.files[path] = bytes(data)
            case Append(path, position, data):
                assert position == len(self.files[path])
                self.files[path] += bytes(data)
            case Remove(path):
                del self.files[path]
            case _:
                pass
        return 0

    def wait_stored(self, position: int) -> None:
        """Everything is stored at once."""


def _source(tmp_path: Path) -> Path:
    for name, data in _FILES.items():
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    rows = tmp_path / "a" / _ROWS
    rows.mkdir()
    (rows / "000002.sst").write_bytes(b"rows by key since their copy was made")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "000001.sst").write_bytes(b"rows by key" * 100)
    (copy / "CURRENT").write_bytes(b"")
    return tmp_path / "a"


def _set(store: Any) -> MoveSet:
    return MoveSet(store, _TICKET, piece_bytes=100, sleep=lambda _: None)


def _upload(store: Any, tmp_path: Path) -> None:
    """Store what is stable of an open table, and then, frozen, the rest."""
    root = _source(tmp_path)
    sent = SentFiles(_set(store), root, _TICKET.table_id)
    gone = root / "tables/7/bucket-1/00000000000000000007.log"
    gone.write_bytes(b"retention removes it")
    logs = [(root / _LOG, 300), (gone, 5), (root / "tables/7/bucket-1/nothing.log", 5)]
    rows = {"tables/7/bucket-0": tmp_path / "copy"}
    assert sent.send_stable(logs, rows) == 300 + 5 + 1_100
    gone.unlink()
    assert sent.send_rest() == sum(map(len, _FILES.values())) - 300
    assert sent.passes == 2


def _download(store: Any, tmp_path: Path) -> dict[str, bytes]:
    root = tmp_path / "b"
    (root / "tables").mkdir(parents=True)
    journal: Any = _Journal()

    def fail(why: str) -> None:
        raise OSError(errno.EIO, why)

    filesystem = JournaledFilesystem(
        LocalFilesystem(), root, journal, log_bytes={}, on_failure=fail
    )
    assert not _set(store).download(0, root, filesystem)
    assert _set(store).download(1, root, filesystem)
    found = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }
    rows = {name: found.pop(name) for name in tuple(found) if name.startswith(_ROWS)}
    assert rows == {f"{_ROWS}/000001.sst": b"rows by key" * 100, f"{_ROWS}/CURRENT": b""}
    assert {name for name in journal.files if name not in found} == set()
    assert journal.files == found
    assert (root / "tables/7/transactions").is_dir()
    return found


def _change(store: MemoryStore, key: str, change: Callable[[Any], None]) -> None:
    """Let a list of parts that is stored be another, as if it had been written so."""
    content = unseal(key, store.objects[key])
    change(content)
    store.objects[key] = seal(key, content, nonce="")


def test_files_arrive_byte_by_byte_and_are_in_the_journal(tmp_path: Path) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    assert _download(store, tmp_path) == _FILES
    clear_moves(store, "b")
    assert store.objects
    clear_moves(store, "a")
    assert not store.objects


@pytest.mark.parametrize("seed", range(5))
def test_answers_may_be_lost(tmp_path: Path, seed: int) -> None:
    store = FaultyMemoryStore(seed, share=0.2)
    _upload(store, tmp_path)
    assert _download(store, tmp_path) == _FILES


def test_what_is_damaged_or_missing_does_not_arrive(tmp_path: Path) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    for number, key in enumerate(sorted(store.objects)):
        intact = store.objects[key]
        for wrong in (intact[:-1], bytes([intact[0] ^ 1]) + intact[1:]):
            store.objects[key] = wrong
            with pytest.raises(CorruptDataError):
                _download(store, tmp_path / f"{number}-{len(wrong)}-{wrong[0]}")
        del store.objects[key]
        with pytest.raises(UnavailableError):
            _download(store, tmp_path / f"{number}-none")
        store.objects[key] = intact


@pytest.mark.parametrize(
    "path",
    [
        "service.json",
        "tables/8/table.json",
        "tables/7/../8/table.json",
        "tables/7/kv/x",
        "tables/7/bucket-0/kv/../x",
        "tables/7/bucket-0/kv/..",
        "tables/8/bucket-0/kv/CURRENT",
        "/etc/x",
    ],
)
def test_no_file_lies_outside_of_the_table(tmp_path: Path, path: str) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    _change(store, _LISTS[0], lambda content: content["parts"][0].update(path=path))
    with pytest.raises(CorruptDataError, match="cannot be of this move"):
        _download(store, tmp_path)


def test_the_set_of_another_move_does_not_arrive(tmp_path: Path) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    _change(store, _LISTS[1], lambda content: content["ticket"].update(version=2))
    with pytest.raises(CorruptDataError, match="cannot be of this move"):
        _download(store, tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"position": 7}, {"position": 400}, {"path": "tables/7/table.json"}]
)
def test_rounds_that_do_not_fit_each_other_do_not_arrive(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    _change(
        store,
        _LISTS[1],
        lambda content: next(part for part in content["parts"] if part["position"]).update(wrong),
    )
    with pytest.raises(CorruptDataError):
        _download(store, tmp_path)


def test_files_that_are_not_all_there_do_not_arrive(tmp_path: Path) -> None:
    store = MemoryStore()
    _upload(store, tmp_path)
    _change(store, _LISTS[1], lambda content: content["whole"].update({"tables/7/pins.json": 5}))
    with pytest.raises(CorruptDataError, match="not whole"):
        _download(store, tmp_path)
