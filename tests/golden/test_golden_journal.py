"""Objects of a journal of each version, byte for byte, for as long as this project lives.

`journal_v1/` is one epoch: what opened it, one object of every kind of operation, its seal. A
change that breaks a test here needs a new version, a new folder, and code that still reads these.
"""

from __future__ import annotations

from pathlib import Path

from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    ObjectKind,
    checksum_of,
    encode_facts,
    encode_operations,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
)
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore

_GOLDEN = Path(__file__).parent / "journal_v1"
_NAMES = ShardNames("0")
_SERVICE = "0123456789abcdef0123456789abcdef"
_OPEN = {
    "endpoint": "http://127.0.0.1:8765",
    "lease_ms": 10_000,
    "previous_epoch": 0,
    "previous_seal_seq": 0,
    "service_id": _SERVICE,
}
_OPERATIONS: list[Operation] = [
    MakeDirectory("tables/1/bucket-0"),
    Replace("tables/1/table.json", b"{}"),
    Append("tables/1/bucket-0/00000000000000000000.log", 4_096, b"frames"),
    Remove("tables/1/lake.json"),
    Move("tables/1", "tables/1.dropped"),
    RemoveTree("tables/1.dropped"),
]


def write_epoch(root: Path) -> None:
    """Write the epoch as today's code does."""
    store = FileObjectStore(root)
    journal, nonce = journal_identity(_SERVICE, "0"), bytes(range(16))
    checksum = 0
    for seq in range(3):
        place = Place(1, seq)
        if seq == 1:
            buffers = encode_operations(
                _OPERATIONS, place=place, journal=journal, nonce=nonce, previous_checksum=checksum
            )
        else:
            kind = ObjectKind.SEAL if seq else ObjectKind.OPEN
            buffers = encode_facts(
                kind,
                {"reason": "stopped"} if seq else _OPEN,
                place=place,
                journal=journal,
                nonce=nonce,
                previous_checksum=checksum,
            )
        checksum = checksum_of(buffers)
        store.create(_NAMES.object(place), buffers)


def test_the_golden_epoch_is_read() -> None:
    reader = JournalReader(FileObjectStore(_GOLDEN), _NAMES, start=Place(1, 0))

    found = [reader.next() for _ in range(3)]

    opened, operations, seal = (one for one in found if one is not None)
    assert opened.facts == _OPEN
    assert list(operations.operations) == _OPERATIONS
    assert (seal.kind, seal.facts) == (ObjectKind.SEAL, {"reason": "stopped"})
    assert reader.next() is None


def test_the_same_bytes_are_written_today(tmp_path: Path) -> None:
    write_epoch(tmp_path)

    for place in (Place(1, 0), Place(1, 1), Place(1, 2)):
        key = _NAMES.object(place)
        assert (tmp_path / key).read_bytes() == (_GOLDEN / key).read_bytes(), key
