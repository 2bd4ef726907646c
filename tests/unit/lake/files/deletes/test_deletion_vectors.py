"""Deletion vectors: Puffin files for others' readers, ranges, and damage that is named."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.lake.files.deletes._deletion_vectors import (
    POSITIONS_MAX,
    DeletionVector,
    decode_positions,
    encode_positions,
    read_deletion_vectors,
    write_deletion_vectors,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem

FILES = LakeFilesystem({})
POSITIONS = {
    "file:///t/many.parquet": np.arange(0, 9_000, 3),
    "file:///t/few-é.parquet": np.array([5, 2**33]),
    "file:///t/all.parquet": np.arange(200_000),
}


def _positions(vector: DeletionVector) -> Any:
    ((_, positions),) = read_deletion_vectors(FILES, [vector])
    return positions


def _written(tmp_path: Path) -> list[DeletionVector]:
    return write_deletion_vectors(FILES, f"file://{tmp_path}/d/v.puffin", POSITIONS)


def test_each_vector_is_read_by_its_range(tmp_path: Path) -> None:
    vectors = _written(tmp_path)

    assert {v.data_path for v in vectors} == set(POSITIONS)
    for vector in vectors:
        positions = _positions(vector)
        np.testing.assert_array_equal(positions, POSITIONS[vector.data_path])
        assert vector.position_count == len(positions)


def test_blobs_stand_in_ascending_order_of_length(tmp_path: Path) -> None:
    """DuckDB 1.5.5 reads a shorter blob behind a longer one as the longer one."""
    vectors = _written(tmp_path)

    sizes = [v.size_bytes for v in sorted(vectors, key=lambda v: v.offset)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(POSITIONS)


def test_the_footer_is_of_the_specification(tmp_path: Path) -> None:
    vectors = _written(tmp_path)
    content = (tmp_path / "d" / "v.puffin").read_bytes()

    assert len(content) == vectors[0].file_bytes
    (size,) = struct.unpack_from("<I", content, len(content) - 12)
    assert content[:4] == content[-4:] == content[-16 - size : -12 - size] == b"PFA1"
    assert content[-8:-4] == bytes(4)
    blobs = json.loads(content[-12 - size : -12])["blobs"]
    assert blobs == [
        {
            "type": "deletion-vector-v1",
            "fields": [2147483645],
            "snapshot-id": -1,
            "sequence-number": -1,
            "offset": v.offset,
            "length": v.size_bytes,
            "properties": {
                "referenced-data-file": v.data_path,
                "cardinality": str(v.position_count),
            },
        }
        for v in vectors
    ]


def test_pyiceberg_reads_the_file(tmp_path: Path) -> None:
    _written(tmp_path)

    file = PuffinFile((tmp_path / "d" / "v.puffin").read_bytes())
    read = {v.referenced_data_file: v.to_vector() for v in deletion_vectors_from_puffin_file(file)}
    assert {path: values.to_pylist() for path, values in read.items()} == {
        path: values.tolist() for path, values in POSITIONS.items()
    }


def test_a_file_that_cannot_be_finished_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "v.puffin"
    path.symlink_to("/dev/full")

    with pytest.raises(StorageFailedError, match="No space left"):
        write_deletion_vectors(FILES, str(path), {"f": np.arange(0, 200_000, 2)})
    assert not path.is_symlink()


def test_another_file_or_range_is_damage(tmp_path: Path) -> None:
    vector = _written(tmp_path)[0]

    for wrong, said in (
        ({"file_bytes": vector.file_bytes + 1}, f"not the {vector.file_bytes + 1} of its"),
        ({"offset": vector.file_bytes - 3}, "bytes from byte"),
        ({"size_bytes": 2**62}, "bytes from byte"),
        ({"offset": -1}, "bytes from byte"),
        ({"offset": vector.offset + 1}, "its length says"),
        ({"size_bytes": vector.size_bytes + 1}, "its length says"),
        ({"size_bytes": 3}, "3 bytes are too few"),
        ({"position_count": 3}, "it deletes 2 rows, not the 3 of its table's metadata"),
    ):
        with pytest.raises(CorruptDataError, match=r"v\.puffin") as refused:
            _positions(replace(vector, **wrong))
        assert said in refused.value.message


def _read(vector: DeletionVector) -> list[int] | None:
    """The vector's rows, None where an error names its file."""
    try:
        positions: list[int] = _positions(vector).tolist()
    except CorruptDataError as error:
        if vector.path not in str(error):
            raise
        return None
    return positions


def test_an_exchanged_file_is_damage(tmp_path: Path) -> None:
    """Puffin files of two rounds have one size where as many rows are deleted."""
    first, second = (
        write_deletion_vectors(FILES, f"file://{tmp_path}/{name}.puffin", {data_path: rows})
        for name, data_path, rows in (
            ("a", "file:///t/1.parquet", np.array([1, 2])),
            ("b", "file:///t/2.parquet", np.array([7, 8])),
        )
    )
    assert first[0].file_bytes == second[0].file_bytes
    (tmp_path / "a.puffin").write_bytes((tmp_path / "b.puffin").read_bytes())

    with pytest.raises(CorruptDataError, match=r"a\.puffin' is another one: .* 'b\.puffin'"):
        _positions(first[0])


def test_a_flipped_bit_anywhere_is_named_or_changes_nothing(tmp_path: Path) -> None:
    vectors = write_deletion_vectors(
        FILES,
        f"file://{tmp_path}/v.puffin",
        {"file:///t/1.parquet": np.array([1, 9]), "file:///t/2.parquet": np.arange(50)},
    )
    expected = [_positions(vector).tolist() for vector in vectors]
    content = (tmp_path / "v.puffin").read_bytes()
    refused = 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "v.puffin").write_bytes(damaged)
        found = [_read(vector) for vector in vectors]
        assert all(some in (rows, None) for some, rows in zip(found, expected, strict=True))
        refused += found.count(None)
    assert refused >= 8 * sum(vector.size_bytes for vector in vectors)


def _blob(bitmap: bytes, *, magic: bytes = bytes.fromhex("d1d33964")) -> bytes:
    body = magic + bitmap
    return struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def _part(upper: int, containers: list[tuple[int, int, bytes]], *, is_run: bool = False) -> bytes:
    heads = b"".join(struct.pack("<HH", key, count - 1) for key, count, _ in containers)
    contents = b"".join(content for _, _, content in containers)
    if is_run:
        flags = bytes([255] * ((len(containers) + 7) // 8))
        cookie = struct.pack("<I", 12347 | (len(containers) - 1) << 16) + flags
        places = bytes(4 * len(containers)) if len(containers) >= 4 else b""
    else:
        cookie, places = struct.pack("<II", 12346, len(containers)), bytes(4 * len(containers))
    return struct.pack("<I", upper) + cookie + heads + places + contents


ONE = (0, 1, b"\7\0")


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (_blob(bytes(8), magic=b"\0\0\0\1"), "it begins with 00000001, not d1d33964"),
        (_blob(struct.pack("<Q", 2**63)), "it ends too early"),
        (_blob(struct.pack("<Q", 0) + b"x"), "1 bytes follow its last row"),
        (_blob(struct.pack("<QII", 1, 0, 7)), "a part begins with 7"),
        (_blob(struct.pack("<QIII", 1, 0, 12346, 65_537)), "a part has 65537 containers"),
        (_blob(struct.pack("<Q", 1) + _part(2**31, [ONE])), "part 2147483648 follows part -1"),
        (_blob(struct.pack("<Q", 2) + 2 * _part(4, [ONE])), "part 4 follows part 4"),
        (_blob(struct.pack("<Q", 1) + _part(0, [ONE, ONE])), "not in ascending order"),
        (_blob(struct.pack("<Q", 1) + _part(0, [(0, 2, b"\7\0\7\0")])), "not in ascending order"),
        (_blob(struct.pack("<Q", 1) + _part(0, [(0, 5000, bytes(8192))])), "has 0 rows, not 5000"),
        (
            _blob(struct.pack("<Q", 1) + _part(0, [(0, 6, b"\1\0\xff\xff\5\0")], is_run=True)),
            "a run leaves its container",
        ),
        (
            _blob(struct.pack("<Q", 1) + _part(0, [(0, 7, b"\1\0\0\0\5\0")], is_run=True)),
            "a container has 6 rows, not 7",
        ),
    ],
)
def test_a_bitmap_of_another_form_is_damage_under_a_right_checksum(blob: bytes, said: str) -> None:
    with pytest.raises(CorruptDataError, match="x at byte 4: the deletion vector is damaged") as no:
        decode_positions(blob, "x at byte 4")
    assert said in no.value.message


def test_runs_that_delete_too_much_are_refused_before_they_are_unpacked() -> None:
    run = b"\1\0\0\0\xff\xff"
    containers = [(key, 65_536, run) for key in range(POSITIONS_MAX // 65_536 + 1)]
    blob = _blob(struct.pack("<Q", 1) + _part(0, containers, is_run=True))

    with pytest.raises(CorruptDataError, match="are the most of one file"):
        decode_positions(blob, "x")


def test_no_positions_are_a_blob_too() -> None:
    assert decode_positions(encode_positions(np.empty(0, np.int64)), "x").tolist() == []
