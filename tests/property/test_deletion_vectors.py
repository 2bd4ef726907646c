"""Property: a deletion vector means the same to us and to CRoaring; no flipped bit goes unseen."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from streamhouse.core.errors import CorruptDataError
from streamhouse.lake.files.deletes._deletion_vectors import decode_positions, encode_positions

Positions = npt.NDArray[np.int64]

# Around the edges of containers and of the upper half.
EDGES = st.sampled_from((0, 4096, 65_535, 65_536, 131_071, 2**32 - 1, 2**32, 2**33 + 65_536))
PARTS = st.one_of(
    st.tuples(EDGES, st.integers(1, 70_000), st.just(1)),
    st.tuples(EDGES, st.integers(1, 9_000), st.integers(2, 20)),
    st.tuples(st.integers(0, 2**40), st.integers(1, 300), st.integers(1, 70_000)),
)


@st.composite
def positions_of(draw: st.DrawFn) -> Positions:
    """Draw arithmetic runs: dense ones become runs, others bitsets, sparse ones arrays."""
    parts = draw(st.lists(PARTS, max_size=5))
    values = [start + step * np.arange(count, dtype=np.int64) for start, count, step in parts]
    seed = draw(st.integers(0, 2**20))
    noise = np.random.default_rng(seed).integers(0, 200_000, draw(st.integers(0, 6_000)))
    return np.unique(np.concatenate([*values, noise.astype(np.int64)]))


def _by_croaring(positions: Positions, *, with_runs: bool) -> bytes:
    body = bytearray()
    uppers = np.unique(positions >> 32)
    for upper in uppers:
        lowers = positions[positions >> 32 == upper] & 0xFFFF_FFFF
        bits = BitMap(lowers.astype(np.uint32))
        if with_runs:
            bits.run_optimize()
        body += struct.pack("<I", int(upper)) + bits.serialize()
    return _framed(struct.pack("<Q", len(uppers)) + body)


def _framed(bitmap: bytes) -> bytes:
    body = bytes.fromhex("d1d33964") + bitmap
    return struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))


@given(positions_of(), st.booleans())
def test_what_croaring_writes_is_read(positions: Positions, with_runs: bool) -> None:
    read = decode_positions(_by_croaring(positions, with_runs=with_runs), "a file")

    assert read.dtype == np.int64
    np.testing.assert_array_equal(read, positions)


@given(positions_of())
def test_our_bytes_are_those_of_croaring_with_runs(positions: Positions) -> None:
    blob = encode_positions(positions)

    assert blob == _by_croaring(positions, with_runs=True)
    np.testing.assert_array_equal(decode_positions(blob, "a file"), positions)


@given(st.lists(st.integers(0, 300_000), max_size=40, unique=True), st.integers(0, 90))
def test_every_flipped_bit_is_found(values: list[int], run: int) -> None:
    positions = np.unique(np.array([*values, *range(70_000, 70_000 + run)], np.int64))
    blob = encode_positions(positions)

    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptDataError, match="a file"):
            decode_positions(bytes(damaged), "a file")


@given(positions_of(), st.data())
def test_bytes_under_a_right_checksum_are_positions_or_damage(
    positions: Positions, data: st.DataObject
) -> None:
    """Whoever wrote a checksum over nonsense gets an error, and no crash and no huge array."""
    bitmap = bytearray(encode_positions(positions)[8:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(bitmap) - 1))
        bitmap[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 8)) * data.draw(st.booleans())
    try:
        read = decode_positions(_framed(bytes(bitmap[: len(bitmap) - cut])), "a file")
    except CorruptDataError as error:
        assert "a file: the deletion vector is damaged" in error.message  # noqa: PT017
    else:
        assert np.all(read[:-1] < read[1:])
        assert not len(read) or read[0] >= 0
