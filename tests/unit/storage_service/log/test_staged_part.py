"""Files of staged rows: read back as they were, and damage is found."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.staged_part import StagedPart, encode_part
from tests.support.in_process_service import EVENTS, event_rows

BATCHES = [
    RoutedBatch(bucket, rows.num_rows, memoryview(rows.serialize()).cast("B"))
    for bucket, rows in ((2, event_rows(0, 7)), (0, event_rows(7, 8)), (2, event_rows(8, 20)))
]


def _stored(path: Path, batches: list[RoutedBatch]) -> bytes:
    data = b"".join(encode_part(EVENTS, batches, table_id=7))
    path.write_bytes(data)
    return data


def _open(path: Path, table_id: int = 7) -> StagedPart:
    return StagedPart.open(path, filesystem=LocalFilesystem(), table_id=table_id)


@pytest.mark.parametrize("batches", [BATCHES, []])
def test_a_part_is_read_back_as_it_was(tmp_path: Path, batches: list[RoutedBatch]) -> None:
    data = _stored(tmp_path / "part", batches)

    part = _open(tmp_path / "part")

    assert part.schema == EVENTS
    assert part.size_bytes == len(data)
    assert part.row_count == sum(batch.row_count for batch in batches)
    assert [tuple(batch) for batch in part.batches()] == [tuple(batch) for batch in batches]
    assert part.rows_by_bucket() == ({2: 19, 0: 1} if batches else {})


def test_every_cut_off_file_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "part"
    data = _stored(path, BATCHES)
    for size in range(0, len(data), 13):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptDataError):
            _open(path)
    payload_bytes = sum(len(batch.payload) for batch in BATCHES)
    found = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.unlink()
        path.write_bytes(damaged)
        try:
            part = _open(path)
            rows = [pa.py_buffer(batch.payload) for batch in part.batches()]
        except CorruptDataError:
            found += 1
        else:
            # The schema, which the table knows, and padding.
            assert rows == [pa.py_buffer(batch.payload) for batch in BATCHES]
    assert found > payload_bytes


def test_a_file_of_another_table_is_refused(tmp_path: Path) -> None:
    _stored(tmp_path / "part", BATCHES)

    with pytest.raises(CorruptDataError, match="its header is not of"):
        _open(tmp_path / "part", table_id=8)
