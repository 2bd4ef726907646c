"""The door to RocksDB: values, the marker, scans, copies, and errors as ours."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    OverloadedError,
    StorageFailedError,
    UnavailableError,
)
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore
from tests.support.held_step import lower


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksdbStore]:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    yield store
    store.close()


def binary(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary())


def test_put_get_delete(store: RocksdbStore) -> None:
    store.write(binary(b"\x01a", b"\x01b"), binary(b"1", b"2"), marker=Marker(2, 2))
    store.write(binary(b"\x01a", b"\x01c"), binary(None, b"3"), marker=Marker(4, 2))

    assert store.get(binary(b"\x01c", b"\x01a", b"\x01b")).to_pylist() == [b"3", None, b"2"]
    assert store.get_one(b"\x01b") == b"2"
    assert store.get(binary()).to_pylist() == []
    assert store.written_marker == Marker(4, 2)


def test_changes_of_one_key_in_one_run_happen_in_order(store: RocksdbStore) -> None:
    keys = binary(b"\x01a", b"\x01a", b"\x01b", b"\x01b")

    store.write(keys, binary(None, b"1", b"2", None), marker=Marker(4, 1))

    assert store.get(binary(b"\x01a", b"\x01b")).to_pylist() == [b"1", None]


def test_who_closes_waits_for_reads_under_way_and_lets_go_of_the_files(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    many = pa.array([b"\x01%08d" % i for i in range(20_000)], pa.binary())
    store.write(many, many, marker=Marker(1, len(many)))
    store.flush()
    is_reading = threading.Event()

    def read() -> None:
        with contextlib.suppress(UnavailableError):
            while True:
                assert store.get(many).equals(many)
                is_reading.set()

    reading = [threading.Thread(target=read) for _ in range(2)]
    for thread in reading:
        thread.start()
    assert is_reading.wait(60)

    store.close()

    for thread in reading:
        thread.join(60)
        assert not thread.is_alive()
    RocksdbStore(tmp_path / "kv", table_id=3, bucket=1).close()


def test_a_read_at_the_moment_of_closing_says_that_it_is_closed(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)

    class Closing:
        def get(self, keys: list[bytes]) -> list[bytes]:
            store.close()
            raise RuntimeError("Already mutably borrowed")

        def close(self) -> None:
            pass

    store._db = Closing()  # type: ignore[assignment]

    with pytest.raises(UnavailableError, match="is closed"):
        store.get_few([b"a", b"b"])


def test_a_scan_that_is_not_read_to_its_end_keeps_no_files_of_a_closed_store(
    tmp_path: Path,
) -> None:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    many = pa.array([b"\x01%04d" % i for i in range(100)], pa.binary())
    store.write(many, many, marker=Marker(1, len(many)))
    begun, untouched = store.scan(chunk_rows=10), store.scan()
    next(begun)

    store.close()

    RocksdbStore(tmp_path / "kv", table_id=3, bucket=1).close()
    for scan in (begun, untouched):
        with pytest.raises(UnavailableError, match="is closed"):
            next(scan)


def test_only_what_is_flushed_is_claimed_durable(tmp_path: Path, store: RocksdbStore) -> None:
    store.write(binary(b"\x01a"), binary(b"1"), marker=Marker(1, 1))
    assert store.flushed_marker == Marker(0, 0)

    store.flush()
    assert store.flushed_marker == Marker(1, 1)

    store.write(binary(b"\x01b"), binary(b"2"), marker=Marker(2, 2))
    store.seal()
    store.flush()
    assert store.flushed_marker == Marker(2, 2)
    store.close()
    again = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    assert again.written_marker == again.flushed_marker == Marker(2, 2)
    again.close()


def test_a_marker_moves_without_rows(store: RocksdbStore) -> None:
    store.write(binary(), binary(), marker=Marker(9, 0))
    store.flush()

    assert store.flushed_marker == Marker(9, 0)


def test_a_chunk_of_large_rows_is_bounded_by_its_bytes(store: RocksdbStore) -> None:
    """A load of rows of a megabyte once took ten thousand of them at a time."""
    keys = pa.array([b"\x01%d" % number for number in range(9)], pa.binary())
    values = pa.array([b"x" * (5 << 20)] * 8 + [b"small"], pa.binary())
    store.write(keys, values, marker=Marker(9, 9))

    counts = [len(chunk) for chunk, _ in store.scan(chunk_rows=10_000)]

    assert counts == [4, 4, 1]
    assert [len(chunk) for chunk, _ in store.scan(chunk_bytes=6 << 20)] == [2, 2, 2, 2, 1]


def test_a_scan_is_of_a_range_and_of_its_moment(store: RocksdbStore) -> None:
    keys = [b"\x01" + bytes([n]) for n in range(9)]
    store.write(binary(*keys), binary(*[b"x"] * 9), marker=Marker(9, 9))

    whole = store.scan(chunk_rows=2)
    part = store.scan(chunk_rows=2, start=keys[2], end=keys[5])
    store.write(binary(keys[3], b"\x01\x03\x01"), binary(None, b"y"), marker=Marker(10, 9))

    assert [key for chunk, _ in whole for key in chunk.to_pylist()] == keys
    assert [key for chunk, _ in part for key in chunk.to_pylist()] == keys[2:5]


def test_a_checkpoint_has_everything_written(tmp_path: Path, store: RocksdbStore) -> None:
    store.write(binary(b"\x01a"), binary(b"1"), marker=Marker(1, 1))

    store.checkpoint(tmp_path / "copy")

    copy = RocksdbStore(tmp_path / "copy", table_id=3, bucket=1)
    assert copy.written_marker == Marker(1, 1)
    assert copy.get_one(b"\x01a") == b"1"
    copy.close()


def test_a_write_that_rocksdb_refuses_can_be_written_again(
    store: RocksdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the chunks are in when RocksDB stalls: the marker is not."""
    lower(monkeypatch, "stored-chunk", 2)
    database = store._db

    class Stalling:
        chunks = 0

        def write(self, *args: Any) -> None:
            self.chunks += 1
            if self.chunks == 2:
                raise Exception("Result incomplete: Write stall")
            database.write(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(database, name)

    monkeypatch.setattr(store, "_db", Stalling())
    keys, values = binary(b"\x01a", b"\x01b", b"\x01c"), binary(b"1", b"2", b"3")

    with pytest.raises(OverloadedError, match="behind"):
        store.write(keys, values, marker=Marker(3, 3))
    assert store.written_marker == Marker(0, 0)
    assert store.get_one(b"\xffmarker") is None

    store.write(keys, values, marker=Marker(3, 3))
    assert store.get(keys).to_pylist() == [b"1", b"2", b"3"]


def test_a_second_opener_is_told(tmp_path: Path, store: RocksdbStore) -> None:
    with pytest.raises(StorageFailedError, match="LOCK"):
        RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)


@pytest.mark.parametrize(("table_id", "bucket"), [(4, 1), (3, 0)])
def test_the_rows_of_another_bucket_are_refused(
    tmp_path: Path, store: RocksdbStore, table_id: int, bucket: int
) -> None:
    store.write(binary(), binary(), marker=Marker(1, 0))
    store.close()

    with pytest.raises(CorruptDataError, match="belongs to bucket 1 of table 3"):
        RocksdbStore(tmp_path / "kv", table_id=table_id, bucket=bucket)


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path, store: RocksdbStore) -> None:
    store.write(binary(b"\x01a"), binary(b"1" * 1_000), marker=Marker(1, 1))
    store.flush()
    store.close()
    (table,) = (tmp_path / "kv").glob("*.sst")
    data = bytearray(table.read_bytes())
    data[40:60] = bytes(20)
    table.write_bytes(data)

    with pytest.raises(CorruptDataError):
        RocksdbStore(tmp_path / "kv", table_id=3, bucket=1).get_one(b"\x01a")


@pytest.fixture
def rows_on_disk(tmp_path: Path) -> dict[bytes, bytes]:
    """3,000 rows in one file, closed."""
    rows = {b"\x01" + i.to_bytes(4, "big"): b"%d" % i * 9 for i in range(3_000)}
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    store.write(binary(*rows), binary(*rows.values()), marker=Marker(3_000, 3_000))
    store.flush()
    store.close()
    return rows


def _note(told: list[str], error: CorruptDataError) -> CorruptDataError:
    told.append(error.message)
    return error


def _asked(store: RocksdbStore, rows: dict[bytes, bytes]) -> int:
    """Get and scan rows: each answer must be right; return how many were refused."""
    refused = 0
    keys = list(rows)
    for start in range(0, len(keys), 500):
        some = keys[start : start + 500]
        with contextlib.suppress(CorruptDataError):
            refused += 1
            assert store.get(binary(*some)).to_pylist() == [rows[key] for key in some]
            assert store.get_one(some[7]) == rows[some[7]]
            assert store.get_one(some[7] + b"?") is None
            refused -= 1
    with contextlib.suppress(CorruptDataError):
        refused += 1
        found = {}
        for part, values in store.scan(chunk_rows=300):
            found.update(zip(part.to_pylist(), values.to_pylist(), strict=True))
        assert found == rows
        refused -= 1
    return refused


@pytest.mark.parametrize("when", ["closed", "open"])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.92, 0.96, 0.975, 0.99, 1.0])
def test_a_flipped_bit_never_hides_a_row(
    tmp_path: Path, rows_on_disk: dict[bytes, bytes], when: str, part: float
) -> None:
    """In blocks of rows, filter, index, properties and footer; before the opening and after."""
    (table,) = (tmp_path / "kv").glob("*.sst")
    pristine = table.read_bytes()
    start = int(part * (len(pristine) - 50))
    for position in range(start, start + 50, 9):
        data = bytearray(pristine)
        data[position] ^= 1 << (position % 8)
        with contextlib.ExitStack() as opened:
            told: list[str] = []
            if when == "closed":
                table.write_bytes(data)
                try:
                    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
                except CorruptDataError:
                    continue
            else:
                table.write_bytes(pristine)
                store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
                with table.open("r+b") as file:
                    file.write(data)
            opened.callback(store.close)
            store.on_damage = functools.partial(_note, told)
            refused = _asked(store, rows_on_disk)
            assert (refused > 0) == (len(told) > 0)
            assert refused > 0 or part > 0.9, "blocks of rows are verified at every read"
            if when == "open" and part < 0.9:
                # What was read before and was whole is verified again.
                table.write_bytes(pristine)
                assert _asked(store, rows_on_disk) == 0
                table.write_bytes(data)
                assert _asked(store, rows_on_disk) == refused


def test_options_are_ours_after_a_restart_too(
    tmp_path: Path, rows_on_disk: dict[bytes, bytes]
) -> None:
    """Not what a file says that has no checksum."""
    for path in (tmp_path / "kv").glob("OPTIONS-*"):
        path.write_text(path.read_text().replace("filter_policy=bloomfilter", "filter_policy=x"))
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    settings = (tmp_path / "kv" / "LOG").read_text()
    assert "filter_policy: bloomfilter" in settings
    assert "no_block_cache: 1" in settings
    assert _asked(store, rows_on_disk) == 0
    store.close()


def test_a_file_that_is_cut_while_it_is_open_is_an_error(
    tmp_path: Path, rows_on_disk: dict[bytes, bytes]
) -> None:
    store = RocksdbStore(tmp_path / "kv", table_id=3, bucket=1)
    (table,) = (tmp_path / "kv").glob("*.sst")
    os.truncate(table, 8_000)

    assert _asked(store, rows_on_disk) >= 6
    store.close()


def test_after_close_reads_say_so(store: RocksdbStore) -> None:
    store.close()
    store.close()

    with pytest.raises(UnavailableError, match="closed"):
        store.get_one(b"\x01a")
    with pytest.raises(UnavailableError, match="closed"):
        store.write(binary(b"\x01a"), binary(b"1"), marker=Marker(1, 1))
