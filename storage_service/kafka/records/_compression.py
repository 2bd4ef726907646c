"""Compression of a batch's records, in the formats of Kafka's clients, with bounded decompression.

`gzip` is RFC 1952, `zstd` RFC 8878. `lz4` is the LZ4 frame format; Java's client reads only frames
with independent blocks. `snappy` is blocks of raw Snappy in the framing of snappy-java, "xerial",
or one raw block without framing:

    magic 82 'SNAPPY' 00 | version i32 | oldest compatible version i32 | blocks
    block: compressed bytes i32 | raw Snappy                                      (big endian)

Decompression stops at the caller's bound: streams are read up to the bound, and a block of Snappy
announces its length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault

__all__ = ["Compression", "compress", "decompress"]


class Compression(IntEnum):
    """The compression of a batch; the values are those of the batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_STREAMS: Final = {Compression.GZIP: "gzip", Compression.LZ4: "lz4", Compression.ZSTD: "zstd"}
_READ_BYTES_MIN: Final = 1 << 16
# The usual expansion, for which the first read has room.
_USUAL_RATIO: Final = 4

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = struct.Struct(">i")
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
# Snappy's densest element copies 64 bytes with 3 bytes, so a longer announcement is wrong.
_SNAPPY_RATIO_MAX: Final = 22

# Version 1, independent blocks of up to 4 MiB, no checksums; the last byte is the header's xxh32.
_LZ4_HEADER: Final = bytes.fromhex("04224d18607073")
_LZ4_BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024
_LZ4_BLOCK: Final = struct.Struct("<I")
_LZ4_IS_STORED: Final = 1 << 31
_LZ4_END: Final = bytes(4)


def decompress(data: memoryview, compression: Compression, *, bytes_max: int) -> bytes:
    """Return the decompressed data, of at most `bytes_max` bytes.

    Raises InvalidRecordsError for data that is too large or invalid. Memory beyond the result is
    bounded by twice `bytes_max` and the library's window.
    """
    try:
        if compression is Compression.NONE:
            pieces = list(_within(iter([bytes(data)]), bytes_max))
        elif compression is Compression.SNAPPY:
            pieces = list(_within(_snappy_pieces(data, bytes_max), bytes_max))
        else:
            pieces = list(_within(_stream_pieces(data, compression, bytes_max), bytes_max))
    except (OSError, pa.ArrowInvalid, struct.error) as error:
        raise InvalidRecordsError(
            f"the records are not compressed with {compression.name.lower()}, as their batch says"
        ) from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def compress(data: bytes, compression: Compression) -> bytes:
    """Return `data` compressed, in a form for all clients."""
    return bytes(_COMPRESSORS[compression](data))


def _within(pieces: Iterator[bytes], bytes_max: int) -> Iterator[bytes]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > bytes_max:
            raise _too_large(bytes_max)
        yield piece


def _too_large(bytes_max: int) -> InvalidRecordsError:
    return InvalidRecordsError(
        f"the records have more than {bytes_max} bytes; send smaller batches",
        fault=RecordsFault.TOO_LARGE,
    )


def _stream_pieces(data: memoryview, compression: Compression, bytes_max: int) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.BufferReader(data), _STREAMS[compression]) as stream:
        read_bytes = max(_READ_BYTES_MIN, _USUAL_RATIO * len(data))
        while True:
            read_bytes = min(read_bytes, bytes_max + 1)
            piece = stream.read(read_bytes)
            if not piece:
                return
            yield piece
            read_bytes *= 2


def _snappy_pieces(data: memoryview, bytes_max: int) -> Iterator[bytes]:
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        yield _snappy_block(data, bytes_max)
        return
    position = len(_XERIAL_HEADER)
    while position < len(data):
        (block_bytes,) = _XERIAL_BLOCK.unpack_from(data, position)
        position += _XERIAL_BLOCK.size
        if not 0 < block_bytes <= len(data) - position:
            raise pa.ArrowInvalid(f"a block of {block_bytes} bytes")
        yield _snappy_block(data[position : position + block_bytes], bytes_max)
        position += block_bytes


def _snappy_block(block: memoryview, bytes_max: int) -> bytes:
    raw_bytes = 0
    for index, byte in enumerate(block[:5]):
        raw_bytes |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    else:
        raise pa.ArrowInvalid("no length")
    if raw_bytes > _SNAPPY_RATIO_MAX * len(block):
        raise pa.ArrowInvalid(f"{raw_bytes} bytes promised by {len(block)}")
    if raw_bytes > bytes_max:
        raise _too_large(bytes_max)
    raw: bytes = pa.decompress(block, decompressed_size=raw_bytes, codec="snappy", asbytes=True)
    return raw


def _snappy(data: bytes) -> bytes:
    pieces = [_XERIAL_HEADER]
    for block in _blocks(data, _XERIAL_BLOCK_BYTES):
        compressed = pa.compress(block, codec="snappy", asbytes=True)
        pieces += [_XERIAL_BLOCK.pack(len(compressed)), compressed]
    return b"".join(pieces)


def _lz4(data: bytes) -> bytes:
    # Blocks in Arrow's own frames depend on each other.
    pieces: list[bytes | memoryview] = [_LZ4_HEADER]
    for block in _blocks(data, _LZ4_BLOCK_BYTES_MAX):
        compressed = pa.compress(block, codec="lz4_raw", asbytes=True)
        if len(compressed) < len(block):
            pieces += [_LZ4_BLOCK.pack(len(compressed)), compressed]
        else:
            pieces += [_LZ4_BLOCK.pack(len(block) | _LZ4_IS_STORED), block]
    return b"".join([*pieces, _LZ4_END])


def _blocks(data: bytes, block_bytes: int) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[start : start + block_bytes] for start in range(0, len(view), block_bytes))


_COMPRESSORS: Final[dict[Compression, Callable[[bytes], bytes]]] = {
    Compression.NONE: bytes,
    Compression.GZIP: lambda data: pa.compress(data, codec="gzip", asbytes=True),
    Compression.SNAPPY: _snappy,
    Compression.LZ4: _lz4,
    Compression.ZSTD: lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
