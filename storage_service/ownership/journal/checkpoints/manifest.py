"""A checkpoint's manifest: every file of a data directory at one place of its journal.

The manifest names the packs with the bytes. A file's entry is exact at the place; a file is left
out if an operation between the place and `stored_until` replaced or removed the file. Rows by key
are copies of RocksDB's files, never beyond `stored_until`.

    magic "SHJM" | version: u16 | zero: u16 | crc32c of what follows: u32 | bytes unpacked: u64
    then the content as JSON, packed by zlib                                    (little endian)
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.tree import JournalTree, Packed, Piece, TreeFile

__all__ = ["KeyFile", "KeyRows", "Manifest", "decode_manifest", "encode_manifest"]

_HEADER: Final = struct.Struct("<4sHHIQ")
_MAGIC: Final = b"SHJM"
_VERSION: Final = 1
# A million files need less; a larger manifest is not Streamhouse's.
_CONTENT_BYTES_MAX: Final = 1 << 30
# The number of files encoded at the same time.
_PART_COUNT: Final = 1_000
# The errors of reading JSON of another shape.
_NOT_OURS: Final = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)
_PACK_NAME: Final = re.compile(r"[0-9]{8}-[0-9]{12}")
_BUCKET: Final = re.compile(r"tables/[0-9]{1,19}/bucket-[0-9]{1,19}")
# RocksDB's file names; never a path.
_KEY_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """One of RocksDB's files, and the packs with its bytes."""

    name: str
    length: int
    crc32c: int
    pieces: tuple[Packed, ...]

    def __post_init__(self) -> None:
        if not _KEY_FILE.fullmatch(self.name) or sum(p.length for p in self.pieces) != self.length:
            raise CorruptDataError(f"not a file of rows by key: {self!r:.200}")


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The rows by key of the bucket whose directory is `bucket`, below `applied_offset`."""

    bucket: str
    applied_offset: int
    files: tuple[KeyFile, ...]

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket) or self.applied_offset < 0:
            raise CorruptDataError(f"rows by key of what is no bucket: {self.bucket!r:.200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint. `packs` has the lengths of the named packs.

    The tree is the state after all objects before `place` and the first `applied` operations of the
    object at `place`. All bytes read for the checkpoint were recorded before `stored_until`.
    `next_pack` is the name of the owner's next pack when the checkpoint began.
    """

    service_id: str
    shard: str
    place: Place
    applied: int
    stored_until: Place
    next_pack: str
    tree: JournalTree
    packs: Mapping[str, int]
    key_rows: tuple[KeyRows, ...] = ()

    def check_packs(self) -> None:
        """Raise `CorruptDataError` if a piece lies outside of the named packs."""
        pieces: Iterator[Piece] = itertools.chain(
            (piece for file in self.tree for piece in file.pieces),
            (piece for rows in self.key_rows for file in rows.files for piece in file.pieces),
        )
        for piece in pieces:
            if not isinstance(piece, Packed):
                raise CorruptDataError(f"a checkpoint names bytes that are in no pack: {piece!r}")
            if piece.offset + piece.length > self.packs.get(piece.pack, -1):
                raise CorruptDataError(f"a checkpoint names bytes beyond its pack: {piece!r}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest; only a part of its text is in memory at once."""
    manifest.check_packs()
    packing = zlib.compressobj(1)
    body, length = bytearray(), 0
    for text in _texts(manifest):
        part = text.encode()
        length += len(part)
        body += packing.compress(part)
    body += packing.flush()
    return _HEADER.pack(_MAGIC, _VERSION, 0, crc32c(body), length) + body


def _texts(manifest: Manifest) -> Iterator[str]:
    """Yield the content as JSON, part by part."""
    names = sorted(manifest.packs)
    numbers = {name: number for number, name in enumerate(names)}
    content = {
        "service_id": manifest.service_id,
        "shard": manifest.shard,
        "place": [manifest.place.epoch, manifest.place.seq],
        "applied": manifest.applied,
        "stored_until": [manifest.stored_until.epoch, manifest.stored_until.seq],
        "next_pack": manifest.next_pack,
        "packs": [[name, manifest.packs[name]] for name in names],
        "directories": sorted(manifest.tree.directories),
    }
    yield _json(content).removesuffix("}")
    lists = {
        "files": (_file_to_json(file, numbers) for file in manifest.tree),
        "key_rows": (_key_rows_to_json(rows, numbers) for rows in manifest.key_rows),
    }
    for name, values in lists.items():
        yield f',"{name}":['
        is_first = True
        while some := list(itertools.islice(values, _PART_COUNT)):
            yield ("" if is_first else ",") + _json(some)[1:-1]
            is_first = False
        yield "]"
    yield "}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _key_rows_to_json(rows: KeyRows, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "bucket": rows.bucket,
        "applied_offset": rows.applied_offset,
        "files": [
            [file.name, file.length, file.crc32c, [_piece_to_json(p, numbers) for p in file.pieces]]
            for file in rows.files
        ],
    }


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Read a manifest; raises `CorruptDataError` naming `where`."""
    if len(data) >= _HEADER.size:
        magic, version, *_ = _HEADER.unpack_from(data)
        if magic == _MAGIC and version != _VERSION:
            raise CorruptDataError(
                f"{where} has format {version}, which this release cannot read: it is of another"
                " version of Streamhouse"
            )
    try:
        content = _content_of(data)
        packs = [(str(name), int(length)) for name, length in content["packs"]]
        tree = JournalTree()
        for directory in content["directories"]:
            tree.check_and_add_directory(directory)
        for file in content["files"]:
            tree.add_file(_file_from_json(file, packs))
        manifest = Manifest(
            service_id=str(content["service_id"]),
            shard=str(content["shard"]),
            place=_place(content["place"]),
            applied=int(content["applied"]),
            stored_until=_place(content["stored_until"]),
            next_pack=_text(content["next_pack"]),
            tree=tree,
            packs=dict(packs),
            key_rows=tuple(_key_rows_from_json(rows, packs) for rows in content["key_rows"]),
        )
        if not _PACK_NAME.fullmatch(manifest.next_pack) or manifest.applied < 0:
            raise CorruptDataError("its place is invalid")
        if not all(_PACK_NAME.fullmatch(name) and length >= 0 for name, length in packs):
            raise CorruptDataError("it names an invalid pack")
        manifest.check_packs()
    except CorruptDataError as error:
        raise CorruptDataError(f"{where} is damaged: {error.message}") from error
    except _NOT_OURS as error:
        raise CorruptDataError(f"{where} is damaged: {error!r:.200}") from error
    return manifest


def _content_of(data: bytes) -> dict[str, Any]:
    if len(data) < _HEADER.size:
        raise CorruptDataError(f"{len(data)} bytes are no manifest")
    magic, _, _, crc, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptDataError("it does not begin as a manifest")
    body = memoryview(data)[_HEADER.size :]
    if crc32c(body) != crc or length > _CONTENT_BYTES_MAX:
        raise CorruptDataError("its checksum is another")
    try:
        unpacked = zlib.decompressobj().decompress(body, length + 1)
    except zlib.error as error:
        raise CorruptDataError(f"it cannot be unpacked: {error}") from error
    if len(unpacked) != length:
        raise CorruptDataError("its length differs from its header")
    content = json.loads(unpacked)
    if not isinstance(content, dict):
        raise CorruptDataError("it holds no JSON object")
    return content


def _file_to_json(file: TreeFile, numbers: Mapping[str, int]) -> list[Any]:
    if file.is_left_out:
        return [file.path]
    pieces = [_piece_to_json(piece, numbers) for piece in file.pieces if isinstance(piece, Packed)]
    return [file.path, file.length, file.crc32c, pieces]


def _file_from_json(value: list[Any], packs: list[tuple[str, int]]) -> TreeFile:
    if len(value) == 1:
        return TreeFile(_text(value[0]), is_left_out=True)
    path, length, crc, pieces = value
    decoded_pieces = [_piece_from_json(piece, packs) for piece in pieces]
    return TreeFile(_text(path), int(length), int(crc), list(decoded_pieces))


def _key_rows_from_json(value: Mapping[str, Any], packs: list[tuple[str, int]]) -> KeyRows:
    files = tuple(
        KeyFile(_text(name), int(length), int(crc), tuple(_piece_from_json(p, packs) for p in ps))
        for name, length, crc, ps in value["files"]
    )
    return KeyRows(_text(value["bucket"]), int(value["applied_offset"]), files)


def _piece_to_json(piece: Packed, numbers: Mapping[str, int]) -> list[int]:
    return [numbers[piece.pack], piece.offset, piece.length, piece.crc32c]


def _piece_from_json(value: list[int], packs: list[tuple[str, int]]) -> Packed:
    number, offset, length, crc = map(int, value)
    if number < 0:
        raise CorruptDataError("it names a pack outside of its list of packs")
    return Packed(packs[number][0], offset, length, crc)


def _place(value: list[Any]) -> Place:
    epoch, seq = value
    return Place(int(epoch), int(seq))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CorruptDataError(f"it has {value!r:.100} where a name belongs")
    return value
