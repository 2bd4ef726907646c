"""What RocksDB would believe, search for ever or delete is refused before it opens a directory."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.kv._rocksdb_files import problem_of
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore, is_damage


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A closed store of four files."""
    for number in range(1, 5):
        store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
        key, value = pa.array([b"\x01%d" % number]), pa.array([b"x"])
        store.write(key, value, marker=Marker(number, number))
        store.flush()
        store.close()
    return tmp_path / "kv"


def _manifest(rows: Path) -> Path:
    return rows / (rows / "CURRENT").read_text().strip()


def _refused(rows: Path) -> str:
    with pytest.raises(CorruptDataError) as refused:
        RocksdbStore(rows, table_id=3, bucket=1)
    assert is_damage(refused.value)
    return refused.value.message


def test_whole_files_have_no_problem(rows: Path, tmp_path: Path) -> None:
    assert problem_of(rows) == ""
    (tmp_path / "empty").mkdir()
    assert problem_of(tmp_path / "empty") == ""


@pytest.mark.parametrize("kind", [0, 5, 8, 9, 128, 255])
def test_bytes_that_rocksdb_would_search_for_ever(rows: Path, kind: int) -> None:
    manifest = _manifest(rows)
    size = manifest.stat().st_size
    with manifest.open("ab") as file:
        file.write(struct.pack("<IHB", 0x08080808, 0x808, kind) + b"\x08" * 40)

    assert f"is damaged at byte {size}" in _refused(rows)


def test_every_flipped_byte_of_the_manifest_is_seen_but_for_a_torn_end(rows: Path) -> None:
    manifest = _manifest(rows)
    whole = manifest.read_bytes()
    unseen = 0
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 0x41
        manifest.write_bytes(data)
        unseen += not problem_of(rows)
    # A length that reaches behind the end is what a crash leaves: RocksDB ends there.
    assert unseen < len(whole) // 20


@pytest.mark.parametrize("tail", [b"", bytes(5), bytes(4_000), struct.pack("<IHB", 7, 900, 1)])
def test_what_a_crash_leaves_of_a_record_is_no_damage(rows: Path, tail: bytes) -> None:
    with _manifest(rows).open("ab") as file:
        file.write(tail)

    store = RocksdbStore(rows, table_id=3, bucket=1)
    assert store.written_marker == Marker(4, 4)
    assert sum(len(keys) for keys, _ in store.scan()) == 4
    store.close()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("CURRENT", b"MANIFEST-999999\n", "CURRENT names MANIFEST-999999, which is not there"),
        ("CURRENT", b"../kv\n", "CURRENT names no manifest"),
        ("CURRENT", b"\xff\x00", "CURRENT names no manifest"),
        ("CURRENT", b"MANIFEST-000005\n" + b"\x04" * 5_000, "CURRENT names no manifest"),
        ("CURRENT", b"", "CURRENT names no manifest"),
        ("CURRENT", None, "there are files of rows, but no file CURRENT"),
        ("000099.log", b"\x08" * 30, "000099.log has a log of changes"),
    ],
)
def test_files_that_are_not_ours(
    rows: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is None:
        (rows / name).unlink()
    else:
        (rows / name).write_bytes(content)

    assert problem in _refused(rows)
    assert len(list(rows.glob("*.sst"))) == 4
