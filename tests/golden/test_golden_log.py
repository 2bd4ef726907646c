"""The log's files of each format version, byte for byte, for as long as this project lives.

`log_v1/` was written by `write_log` before logs had fingerprints, `log_v2/` before the durable mark
had a second slot, `log_v3/` since. A change that breaks a test here needs a new format version, a
new folder, and code that still reads these.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import StoredBatch
from tests.support.log_world import SettableClock, open_log, read_all

_GOLDEN = Path(__file__).parent
_NAMES = [
    "00000000000000000000.index",
    "00000000000000000000.log",
    "00000000000000000007.log",
    "00000000000000000007.writers",
    "durable.mark",
]
_WRITER = 0xFEEDFACECAFEBEEF


def write_log(directory: Path) -> None:
    """Two segments, two writers, groups of one and two batches, every padding."""
    clock = SettableClock(1_700_000_000_000_000)
    log = open_log(
        LocalFilesystem(),
        directory=directory,
        clock_us=clock,
        table_id=42,
        bucket=3,
        segment_bytes_max=450,
        index_interval_bytes=100,
    )
    for group in (
        [(b"first payload", 4, 1, 0, 0)],
        [(b"\x00\x01\x02\x03", 2, 1, _WRITER, 1), (b"12345678", 1, 2, 77, 1)],
        [(b"x" * 203, 1000, 2, _WRITER, 2)],
    ):
        clock.now_us += 1_500_000
        for payload, rows, schema_id, writer_id, sequence in group:
            log.append(
                RoutedBatch(0, rows, payload, schema_id, writer_id=writer_id, sequence=sequence)
            )
        log.flush()
    log.close()


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write_log(tmp_path / "log")

    written = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}

    assert sorted(written) == _NAMES
    for name, contents in written.items():
        assert contents.hex(" ", 8) == (_GOLDEN / "log_v3" / name).read_bytes().hex(" ", 8), name


@pytest.mark.parametrize("version", ["log_v1", "log_v2", "log_v3"])
def test_the_files_are_read_for_ever(tmp_path: Path, version: str) -> None:
    shutil.copytree(_GOLDEN / version, tmp_path / "log")

    log = open_log(
        LocalFilesystem(), directory=tmp_path / "log", table_id=42, bucket=3, segment_bytes_max=450
    )

    at = 1_700_000_001_500_000
    assert [batch._replace(payload=batch.payload.tobytes()) for batch in read_all(log)] == [
        StoredBatch(0, 4, at, 1, b"first payload"),
        StoredBatch(4, 2, at + 1_500_000, 1, b"\x00\x01\x02\x03"),
        StoredBatch(6, 1, at + 1_500_000, 2, b"12345678"),
        StoredBatch(7, 1000, at + 3_000_000, 2, b"x" * 203),
    ]
    again = log.append(RoutedBatch(0, 2, b"?", 1, writer_id=_WRITER, sequence=1))
    assert (again.base_offset, again.is_duplicate) == (4, True)
    assert log.offset_for_timestamp(at + 1) == 4
    log.close()
    # A log without fingerprints gets a segment with which they begin.
    added = [f"{1007:020d}.log", f"{1007:020d}.writers", f"{7:020d}.index"]
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert names == {*_NAMES, *(added if version == "log_v1" else ())}


def test_the_fingerprints_are_the_same_for_ever(tmp_path: Path) -> None:
    shutil.copytree(_GOLDEN / "log_v2", tmp_path / "log")

    log = open_log(LocalFilesystem(), directory=tmp_path / "log", table_id=42, bucket=3)

    found = {offset: log.fingerprint(offset) for offset in (0, 4, 5, 7, 8, 1007, 1008)}
    assert {at: known and known.hex() for at, known in found.items()} == {
        0: "6788a4f3ce3c3e28",
        4: "ad585c4dfb393727",
        5: "522252653f159cf3",
        7: "b153f11ac9d49f58",
        8: "ff573f49a9cd9c36",
        1007: "64eb78744bf5d6ea",
        1008: None,
    }
    log.close()
