"""Deletion vectors of format version 3: which rows of one data file are gone, in Puffin files.

A blob `deletion-vector-v1` is a length, a magic, a bitmap of positions and a CRC-32 of both:

    u32 big-endian   bytes of magic and bitmap
    D1 D3 39 64
    u64              number of parts, each with the positions of one upper half
      u32            the upper 32 bits of the part's positions, ascending
      roaring        the lower 32 bits, in the portable form of 32-bit Roaring bitmaps
    u32 big-endian   CRC-32 of magic and bitmap

A Roaring bitmap cuts the positions into containers of 65,536: sorted 16-bit integers, a bitset, or
runs. The work is numpy's; Python loops over containers only. pyarrow and numpy only.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem, file_name_metadata

__all__ = [
    "POSITIONS_MAX",
    "DeletionVector",
    "decode_positions",
    "encode_positions",
    "read_deletion_vectors",
    "write_deletion_vectors",
]

Positions = npt.NDArray[np.int64]

# 2 GiB of decoded positions: runs of a few bytes may say any number of positions.
POSITIONS_MAX: Final = 1 << 28
# Reserved by Iceberg's spec for the position of a row in its file.
_ROW_POSITION_FIELD_ID: Final = 2_147_483_645
_PUFFIN_MAGIC: Final = b"PFA1"
_BLOB_TYPE: Final = "deletion-vector-v1"
_MAGIC: Final = bytes.fromhex("d1d33964")
_LENGTH: Final = struct.Struct(">I")
_FRAME_BYTES: Final = 12
_PART_COUNT: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_U16: Final = struct.Struct("<H")
# Roaring's portable form: cookies, and the number of containers from which on a bitmap with runs
# has the containers' places.
_COOKIE: Final = 12346
_COOKIE_WITH_RUNS: Final = 12347
_PLACES_FROM: Final = 4
_CONTAINER_POSITIONS: Final = 1 << 16
_ARRAY_POSITIONS_MAX: Final = 4096
_BITSET_BYTES: Final = _CONTAINER_POSITIONS // 8
_UPPER_HALF_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionVector:
    """The place of one data file's vector in a Puffin file: plain data, to cross processes."""

    path: str
    file_bytes: int
    data_path: str
    offset: int
    size_bytes: int
    position_count: int


def write_deletion_vectors(
    files: LakeFilesystem, path: str, positions: Mapping[str, Positions]
) -> list[DeletionVector]:
    """Write one Puffin file with a vector for each data path; on failure it does not stay.

    The positions are ascending, each once. The blobs stand in ascending order of length: behind a
    longer blob DuckDB 1.5.5 reads a shorter blob as the longer one.
    """
    blobs = sorted(
        ((encode_positions(some), data_path, len(some)) for data_path, some in positions.items()),
        key=lambda blob: (len(blob[0]), blob[1]),
    )
    offset, places = len(_PUFFIN_MAGIC), []
    for blob, data_path, count in blobs:
        places.append((data_path, offset, len(blob), count))
        offset += len(blob)
    footer = _footer(path, places)
    try:
        with files.errors("write", path), files.open_output(path) as sink:
            sink.write(_PUFFIN_MAGIC)
            for blob, _, _ in blobs:
                sink.write(blob)
            sink.write(footer)
    except BaseException:
        with contextlib.suppress(StreamhouseError):
            files.delete(path)
        raise
    return [
        DeletionVector(
            path=path,
            file_bytes=offset + len(footer),
            data_path=data_path,
            offset=start,
            size_bytes=size,
            position_count=count,
        )
        for data_path, start, size, count in places
    ]


def read_deletion_vectors(
    files: LakeFilesystem, vectors: Iterable[DeletionVector]
) -> Iterator[tuple[DeletionVector, Positions]]:
    """Yield the vectors with their deleted positions, ascending; only their bytes are read.

    Damage is `CorruptDataError`, as is a file of another size than the table's metadata say, or
    one with the name of another file inside. A file with several vectors is opened once.
    """
    by_file: dict[tuple[str, int], list[DeletionVector]] = defaultdict(list)
    for vector in vectors:
        by_file[vector.path, vector.file_bytes].append(vector)
    for (path, file_bytes), members in by_file.items():
        ranges = [(vector.offset, vector.size_bytes) for vector in members]
        blobs = files.read_ranges(path, ranges, file_bytes=file_bytes)
        for vector, blob in zip(members, blobs, strict=True):
            yield vector, _checked_positions(vector, blob)


def _checked_positions(vector: DeletionVector, blob: bytes) -> Positions:
    where = f"lake file '{vector.path}' at byte {vector.offset}"
    positions = decode_positions(blob, where)
    if len(positions) != vector.position_count:
        raise _damage(
            where,
            f"it deletes {len(positions)} rows, not the {vector.position_count} of its table's"
            " metadata",
        )
    return positions


def encode_positions(positions: Positions) -> bytes:
    """Return the blob of these positions, which are ascending, each once."""
    uppers = positions >> 32
    starts = np.flatnonzero(np.diff(uppers, prepend=-1))
    body = bytearray(_MAGIC + _PART_COUNT.pack(len(starts)))
    for part in np.split(positions, starts[1:]) if len(starts) else ():
        body += _U32.pack(int(part[0]) >> 32)
        body += _roaring(part & 0xFFFF_FFFF)
    return _LENGTH.pack(len(body)) + body + _LENGTH.pack(zlib.crc32(body))


def decode_positions(blob: bytes, where: str) -> Positions:
    """Return the positions of a blob, ascending; `where` names file and byte for errors.

    Raises `CorruptDataError` for each difference from the form.
    """
    if len(blob) < _FRAME_BYTES + _PART_COUNT.size:
        raise _damage(where, f"{len(blob)} bytes are too few")
    body = memoryview(blob)[_LENGTH.size : -_LENGTH.size]
    (size,), (checksum,) = _LENGTH.unpack_from(blob), _LENGTH.unpack_from(blob, len(blob) - 4)
    if size != len(body):
        raise _damage(where, f"its length says {size} bytes where {len(body)} are")
    if body[: len(_MAGIC)] != _MAGIC:
        raise _damage(where, f"it begins with {bytes(body[:4]).hex()}, not {_MAGIC.hex()}")
    if zlib.crc32(body) != checksum:
        raise _damage(where, "its checksum is wrong")
    try:
        return _Decoder(body, len(_MAGIC)).positions()
    except _Misform as error:
        raise _damage(where, str(error)) from None


def _footer(path: str, places: Sequence[tuple[str, int, int, int]]) -> bytes:
    payload = json.dumps(
        {
            "blobs": [
                {
                    "type": _BLOB_TYPE,
                    "fields": [_ROW_POSITION_FIELD_ID],
                    "snapshot-id": -1,
                    "sequence-number": -1,
                    "offset": offset,
                    "length": size,
                    "properties": {"referenced-data-file": data_path, "cardinality": str(count)},
                }
                for data_path, offset, size, count in places
            ],
            # The name stands last, where `read_range` looks for it.
            "properties": {"created-by": "Streamhouse", **file_name_metadata(path)},
        },
        ensure_ascii=False,
    ).encode()
    no_flags = b"\0\0\0\0"
    return _PUFFIN_MAGIC + payload + _U32.pack(len(payload)) + no_flags + _PUFFIN_MAGIC


def _roaring(lowers: Positions) -> bytes:
    """Return the portable form of a bitmap of 32-bit integers, each container at its smallest."""
    keys = lowers >> 16
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(starts, append=len(lowers))
    is_run_start = np.diff(lowers, prepend=-2) != 1
    is_run_start[starts] = True
    run_starts = np.flatnonzero(is_run_start)
    run_lengths = np.diff(run_starts, append=len(lowers))
    run_counts = np.add.reduceat(is_run_start.astype(np.int64), starts)
    plain_bytes = np.where(counts <= _ARRAY_POSITIONS_MAX, 2 * counts, _BITSET_BYTES)
    run_bytes = _U16.size + 4 * run_counts
    is_run = run_bytes < plain_bytes
    head = np.empty((len(starts), 2), "<u2")
    head[:, 0] = keys[starts]
    head[:, 1] = counts - 1
    if is_run.any():
        out = bytearray(_U32.pack(_COOKIE_WITH_RUNS | (len(starts) - 1) << 16))
        out += np.packbits(is_run, bitorder="little").tobytes()
        has_places = len(starts) >= _PLACES_FROM
    else:
        out = bytearray(_U32.pack(_COOKIE) + _U32.pack(len(starts)))
        has_places = True
    out += head.tobytes()
    if has_places:
        sizes = np.where(is_run, run_bytes, plain_bytes)
        first = len(out) + 4 * len(starts)
        out += (first + np.cumsum(sizes) - sizes).astype("<u4").tobytes()
    values = (lowers & 0xFFFF).astype("<u2")
    first_run = 0
    for start, count, runs, as_runs in zip(
        starts.tolist(), counts.tolist(), run_counts.tolist(), is_run.tolist(), strict=True
    ):
        some = values[start : start + count]
        if as_runs:
            of_container = slice(first_run, first_run + runs)
            pairs = np.empty((runs, 2), "<u2")
            pairs[:, 0] = values[run_starts[of_container]]
            pairs[:, 1] = run_lengths[of_container] - 1
            out += _U16.pack(runs) + pairs.tobytes()
        elif count <= _ARRAY_POSITIONS_MAX:
            out += some.tobytes()
        else:
            bits = np.zeros(_CONTAINER_POSITIONS, np.bool_)
            bits[some] = True
            out += np.packbits(bits, bitorder="little").tobytes()
        first_run += runs
    return bytes(out)


class _Misform(Exception):
    """Bytes that are no bitmap, and why."""


@dataclass(frozen=True, slots=True)
class _Container:
    """One container's place: its first position, its number of positions, its bytes."""

    first: int
    count: int
    content: memoryview
    is_run: bool


class _Decoder:
    """The bitmap behind the magic of a blob, read once from front to back."""

    def __init__(self, body: memoryview, start: int) -> None:
        self._body = body
        self._at = start

    def positions(self) -> Positions:
        # The headers say all sizes: nothing is decoded before the sum is known.
        containers = list(self._containers())
        total = sum(container.count for container in containers)
        if total > POSITIONS_MAX:
            raise _Misform(f"it deletes {total} rows, and {POSITIONS_MAX} are the most of one file")
        out, end = np.empty(total, np.int64), 0
        for container in containers:
            start, end = end, end + container.count
            values = _container_values(container)
            if len(values) != container.count:
                raise _Misform(f"a container has {len(values)} rows, not {container.count}")
            out[start:end] = values
            out[start:end] += container.first
        if not np.all(out[:-1] < out[1:]):
            raise _Misform("its rows are not in ascending order")
        return out

    def _containers(self) -> Iterator[_Container]:
        (parts,) = _PART_COUNT.unpack(self._take(_PART_COUNT.size))
        last = -1
        # A wrong number of parts runs out of bytes.
        for _ in range(parts):
            (upper,) = _U32.unpack(self._take(_U32.size))
            if not last < upper <= _UPPER_HALF_MAX:
                raise _Misform(f"part {upper} follows part {last}")
            last = upper
            yield from self._part(upper << 32)
        if self._at != len(self._body):
            raise _Misform(f"{len(self._body) - self._at} bytes follow its last row")

    def _part(self, first: int) -> Iterator[_Container]:
        (cookie,) = _U32.unpack(self._take(_U32.size))
        if cookie & 0xFFFF == _COOKIE_WITH_RUNS:
            number = (cookie >> 16) + 1
            flags = np.frombuffer(self._take((number + 7) // 8), np.uint8)
            is_run = np.unpackbits(flags, bitorder="little").astype(np.bool_)
            has_places = number >= _PLACES_FROM
        elif cookie == _COOKIE:
            (number,) = _U32.unpack(self._take(_U32.size))
            if number > _CONTAINER_POSITIONS:
                raise _Misform(f"a part has {number} containers")
            is_run, has_places = np.zeros(number, np.bool_), True
        else:
            raise _Misform(f"a part begins with {cookie}, which is no bitmap's")
        head = np.frombuffer(self._take(4 * number), "<u2").reshape(number, 2).astype(np.int64)
        if has_places:
            # The containers stand one behind the other: their sizes say the same.
            self._take(4 * number)
        for (key, less_one), as_runs in zip(head.tolist(), is_run.tolist(), strict=False):
            count = less_one + 1
            if as_runs:
                (runs,) = _U16.unpack(self._take(_U16.size))
                size = 4 * runs
            else:
                size = 2 * count if count <= _ARRAY_POSITIONS_MAX else _BITSET_BYTES
            yield _Container(first | key << 16, count, self._take(size), as_runs)

    def _take(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise _Misform("it ends too early")
        self._at += size
        return self._body[self._at - size : self._at]


def _container_values(container: _Container) -> npt.NDArray[np.integer[Any]]:
    """Return the lower 16 bits of a container's rows."""
    if container.is_run:
        pairs = np.frombuffer(container.content, "<u2").reshape(-1, 2).astype(np.int64)
        starts, lengths = pairs[:, 0], pairs[:, 1] + 1
        if np.any(starts + lengths > _CONTAINER_POSITIONS):
            raise _Misform("a run leaves its container")
        total = int(lengths.sum())
        if total != container.count:
            raise _Misform(f"a container has {total} rows, not {container.count}")
        before = np.cumsum(lengths) - lengths
        lowers: Positions = np.arange(total) + np.repeat(starts - before, lengths)
        return lowers
    if container.count <= _ARRAY_POSITIONS_MAX:
        return np.frombuffer(container.content, "<u2")
    bits = np.unpackbits(np.frombuffer(container.content, np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def _damage(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"{where}: the deletion vector is damaged: {reason}; restore the file from a copy"
    )
