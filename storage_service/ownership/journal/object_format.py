"""Objects of the journal as bytes: a header, then facts as JSON or operations.

Header (little endian, 88 bytes):

| bytes | field |
|---|---|
| 4 | magic `SHJ1` |
| 1 | version, 1 |
| 1 | kind: 1 opens an epoch, 2 has operations, 3 seals the epoch |
| 2 | zero |
| 8 | epoch |
| 8 | seq |
| 16 | journal: whose it is, from the service's id and the shard (`journal_identity`) |
| 16 | nonce of the owner who wrote it |
| 4 | checksum of the object before it, the seal of the epoch before for an open object, or 0 |
| 4 | how many operations |
| 8 | bytes of the body |
| 4 | crc32c of the body |
| 8 | zero |
| 4 | crc32c of all of the header before: the object's *checksum*, as it covers the body's |

An operation is 24 bytes (kind, zero, bytes of path, of target, zero, position, bytes of data),
then path, target and data. All fields are checked before use.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.names import EPOCH_MAX, SEQ_MAX, Place
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
    check_path,
)

__all__ = [
    "BODY_BYTES_MAX",
    "NONCE_BYTES",
    "OBJECT_BYTES_MAX",
    "SEAL_BYTES_MAX",
    "JournalObject",
    "ObjectKind",
    "checksum_of",
    "decode_object",
    "encode_facts",
    "encode_operations",
    "encoded_bytes",
    "journal_identity",
]

BODY_BYTES_MAX: Final = 8 << 20
"""The most bytes of a group of operations; a larger operation is alone in its object."""
OBJECT_BYTES_MAX: Final = 2 << 30
"""No object is larger: an operation is at most a frame of a log."""
NONCE_BYTES: Final = 16
SEAL_BYTES_MAX: Final = 120
"""The most bytes of a seal; objects with operations are hardly ever as small."""
_MAGIC: Final = b"SHJ1"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBBHQQ16s16sIIQI8x")
_CHECKSUM: Final = struct.Struct("<I")
_HEADER_BYTES: Final = _HEADER.size + _CHECKSUM.size
_OPERATION: Final = struct.Struct("<BxHHxxQQ")
_FACTS_BYTES_MAX: Final = 64 << 10
_APPEND, _REPLACE, _REMOVE, _MAKE_DIRECTORY, _MOVE, _REMOVE_TREE = range(1, 7)


class ObjectKind(enum.IntEnum):
    """The kind of an object."""

    OPEN = 1
    OPERATIONS = 2
    SEAL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalObject:
    """One checked object. `facts` of an open object or a seal, else `operations`."""

    kind: ObjectKind
    place: Place
    nonce: bytes
    previous_checksum: int
    checksum: int
    size_bytes: int
    journal: bytes
    facts: Mapping[str, Any] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()


def journal_identity(service_id: str, shard: str) -> bytes:
    """Return the 16 bytes identifying a journal by service and shard."""
    return hashlib.sha256(f"{service_id}/{shard}".encode()).digest()[:16]


def encoded_bytes(operation: Operation) -> int:
    """Return the number of bytes of an operation in a body."""
    match operation:
        case Append(path, _, data) | Replace(path, data):
            return _OPERATION.size + len(path) + len(data)
        case Remove(path) | MakeDirectory(path) | RemoveTree(path):
            return _OPERATION.size + len(path)
        case Move(source, target):
            return _OPERATION.size + len(source) + len(target)


def encode_operations(
    operations: Sequence[Operation],
    *,
    place: Place,
    journal: bytes,
    nonce: bytes,
    previous_checksum: int,
) -> list[Buffer]:
    """Return the buffers of an object; the operations' data is not copied."""
    body: list[Buffer] = []
    for operation in operations:
        body.extend(_encode(operation))
    header = _encode_header(
        ObjectKind.OPERATIONS, place, journal, nonce, previous_checksum, len(operations), body
    )
    return [header, *body]


def encode_facts(
    kind: ObjectKind,
    facts: Mapping[str, Any],
    *,
    place: Place,
    journal: bytes,
    nonce: bytes,
    previous_checksum: int,
) -> list[Buffer]:
    """Return the buffers of an object opening or sealing an epoch."""
    assert kind is not ObjectKind.OPERATIONS
    body = json.dumps(facts, sort_keys=True).encode()
    assert len(body) <= _FACTS_BYTES_MAX
    assert kind is ObjectKind.OPEN or _HEADER_BYTES + len(body) <= SEAL_BYTES_MAX
    return [_encode_header(kind, place, journal, nonce, previous_checksum, 0, [body]), body]


def checksum_of(buffers: Sequence[Buffer]) -> int:
    """Return the checksum of an object encoded here."""
    checksum: int = _CHECKSUM.unpack_from(buffers[0], _HEADER.size)[0]
    return checksum


def decode_object(
    data: Buffer, *, key: str, place: Place, journal: bytes | None = None
) -> JournalObject:
    """Return a decoded object. Its operations' data are views of `data`.

    `journal` is None while the journal's identity is unknown. Raises `CorruptDataError`.
    """
    where = f"object {key} of the journal"
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER_BYTES:
        raise CorruptDataError(f"{where} has {len(view)} bytes, fewer than a header")
    (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
    if crc32c(view[: _HEADER.size]) != checksum:
        raise CorruptDataError(f"{where} has a damaged header")
    (magic, version, kind, _, epoch, seq, owner, nonce, previous, count, body_bytes, body_crc) = (
        _HEADER.unpack_from(view)
    )
    if magic != _MAGIC or version != _VERSION or kind not in ObjectKind.__members__.values():
        raise CorruptDataError(f"{where} is of a version or kind that this release does not know")
    if (epoch, seq) != (place.epoch, place.seq) or epoch > EPOCH_MAX or seq > SEQ_MAX:
        raise CorruptDataError(f"{where} has another place in its header, {epoch}/{seq}")
    if journal is not None and owner != journal:
        raise CorruptDataError(f"{where} belongs to the journal of another service or shard")
    body = view[_HEADER_BYTES:]
    if len(body) != body_bytes or crc32c(body) != body_crc:
        raise CorruptDataError(f"{where} has a damaged body of {len(body)} bytes")
    facts: Mapping[str, Any] = {}
    operations: tuple[Operation, ...] = ()
    if kind == ObjectKind.OPERATIONS:
        operations = tuple(_decode(body, count, where))
    elif count:
        raise CorruptDataError(f"{where} has operations where facts belong")
    else:
        facts = _decode_facts(body, where)
    return JournalObject(
        kind=ObjectKind(kind),
        place=place,
        nonce=nonce,
        previous_checksum=previous,
        checksum=checksum,
        size_bytes=len(view),
        journal=owner,
        facts=facts,
        operations=operations,
    )


def _encode_header(
    kind: ObjectKind,
    place: Place,
    journal: bytes,
    nonce: bytes,
    previous_checksum: int,
    count: int,
    body: Sequence[Buffer],
) -> bytes:
    assert len(journal) == NONCE_BYTES == len(nonce)
    body_bytes, body_crc = 0, 0
    for buffer in body:
        body_bytes += len(buffer)
        body_crc = crc32c(buffer, body_crc)
    assert _HEADER_BYTES + body_bytes <= OBJECT_BYTES_MAX
    header = _HEADER.pack(
        *(_MAGIC, _VERSION, kind, 0, place.epoch, place.seq, journal, nonce),
        *(previous_checksum, count, body_bytes, body_crc),
    )
    return header + _CHECKSUM.pack(crc32c(header))


def _encode(operation: Operation) -> list[Buffer]:
    check_path(operation)
    match operation:
        case Append(path, position, data):
            return _packed(_APPEND, path, position=position, data=data)
        case Replace(path, data):
            return _packed(_REPLACE, path, data=data)
        case Remove(path):
            return _packed(_REMOVE, path)
        case MakeDirectory(path):
            return _packed(_MAKE_DIRECTORY, path)
        case Move(source, target):
            return _packed(_MOVE, source, target=target)
        case RemoveTree(path):
            return _packed(_REMOVE_TREE, path)


def _packed(
    kind: int, path: str, *, target: str = "", position: int = 0, data: Buffer = b""
) -> list[Buffer]:
    head = _OPERATION.pack(kind, len(path), len(target), position, len(data))
    head += path.encode("ascii") + target.encode("ascii")
    return [head, data] if len(data) else [head]


def _decode(body: memoryview, count: int, where: str) -> Iterator[Operation]:
    position = 0
    for _ in range(count):
        if len(body) - position < _OPERATION.size:
            raise CorruptDataError(f"{where} ends within an operation")
        kind, path_bytes, target_bytes, start, data_bytes = _OPERATION.unpack_from(body, position)
        position += _OPERATION.size
        if path_bytes + target_bytes + data_bytes > len(body) - position:
            raise CorruptDataError(f"{where} ends within an operation")
        names = bytes(body[position : position + path_bytes + target_bytes])
        position += len(names)
        data = body[position : position + data_bytes]
        position += data_bytes
        try:
            path, target = names[:path_bytes].decode("ascii"), names[path_bytes:].decode("ascii")
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{where} names a path that cannot be: {names!r}") from error
        operation = _operation(kind, path, target, start, data)
        if operation is None:
            raise CorruptDataError(f"{where} has an operation that cannot be: {path:.200}")
        check_path(operation)
        yield operation
    if position != len(body):
        raise CorruptDataError(f"{where} has bytes after its last operation")


def _operation(
    kind: int, path: str, target: str, position: int, data: memoryview
) -> Operation | None:
    """Return the operation, or None for fields foreign to its kind."""
    has_data, is_move = kind in (_APPEND, _REPLACE), kind == _MOVE
    if (data and not has_data) or bool(target) != is_move or (position and kind != _APPEND):
        return None
    match kind:
        case 1:
            return Append(path, position, data)
        case 2:
            return Replace(path, data)
        case 3:
            return Remove(path)
        case 4:
            return MakeDirectory(path)
        case 5:
            return Move(path, target)
        case 6:
            return RemoveTree(path)
    return None


def _decode_facts(body: memoryview, where: str) -> Mapping[str, Any]:
    if len(body) > _FACTS_BYTES_MAX:
        raise CorruptDataError(f"{where} has more than {_FACTS_BYTES_MAX} bytes of facts")
    try:
        facts = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{where} does not hold JSON") from error
    if not isinstance(facts, dict):
        raise CorruptDataError(f"{where} does not hold a JSON object")
    return facts
