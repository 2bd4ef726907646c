"""Arrow IPC request bodies as they come from outside: bounded and checked before they are believed.

Nothing here knows a table's schema; what the columns must be is the route's business.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.storage_service.wire import ipc_message

__all__ = ["RequestBatch", "RequestStream", "open_request"]

SCHEMA_BYTES_MAX: Final = 4 << 20
"""The most that the schema of a request may have, names included."""
COLUMNS_MAX: Final = 2_100
"""A table's most columns and what may come beside them."""
DEPTH_MAX: Final = 100
_KNOWN_SCHEMA_BYTES_MAX: Final = 16 << 10
_KNOWN_SCHEMAS_MAX: Final = 128


class RequestBatch(NamedTuple):
    """One record batch of a request, with what its custom metadata says.

    `payload` is the record batch as one little-endian IPC message; `bucket` None lets the service
    decide, and `sequence` 0 is none.
    """

    bucket: int | None
    sequence: int
    batch: pa.RecordBatch
    payload: memoryview


@dataclass(frozen=True, slots=True)
class RequestStream:
    """A body whose messages are within the limits.

    A schema that `is_kept` is the very object that the next body with the same schema has.
    """

    schema: pa.Schema
    is_kept: bool
    _foreign_head: bytes | None
    """The schema's message, if the batches after it are not little-endian."""
    _messages: Sequence[ipc_message.IpcMessage]
    _what: str

    def batches(self) -> Iterator[RequestBatch]:
        """Yield every batch, validated; raises `InvalidRequestError` for a malformed one."""
        head = self._foreign_head
        for message in self._messages:
            batch = _read_batch(message.data, self.schema, head, what=self._what)
            yield RequestBatch(
                bucket=_number(message.custom, b"bucket", what=self._what),
                sequence=_number(message.custom, b"sequence", what=self._what) or 0,
                batch=batch,
                payload=message.data if head is None else memoryview(batch.serialize()).cast("B"),
            )


class _ReadSchema(NamedTuple):
    schema: pa.Schema
    is_little_endian: bool


def open_request(
    body: bytes | memoryview, *, what: str, rows_max: int, batch_bytes_max: int, batches_max: int
) -> RequestStream:
    """Check the limits and read the schema; `what` begins every error, as in "append to 'db.t'".

    Raises `InvalidRequestError` for bytes that are no plain IPC stream, `RequestTooLargeError` over
    a limit.
    """
    view = memoryview(body).cast("B")
    # One more than there may be says that there are too many: not all of them need be walked.
    found = list(itertools.islice(ipc_message.messages(view), batches_max + 2))
    if not found or found[0].kind != ipc_message.SCHEMA:
        raise InvalidRequestError(
            f"{what}: the body is not an Arrow IPC stream (no schema message)"
        )
    _check_messages(
        found[1:],
        what=what,
        rows_max=rows_max,
        batch_bytes_max=batch_bytes_max,
        batches_max=batches_max,
    )
    if len(found[0].data) > SCHEMA_BYTES_MAX:
        raise RequestTooLargeError(
            f"{what}: the schema has {len(found[0].data)} bytes; at most {SCHEMA_BYTES_MAX}"
        )
    head = bytes(found[0].data)
    is_kept = len(head) <= _KNOWN_SCHEMA_BYTES_MAX
    try:
        schema, is_little_endian = (_known_schema if is_kept else _read_schema)(head, what)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what}: unreadable schema: {error}") from error
    return RequestStream(schema, is_kept, None if is_little_endian else head, found[1:], what)


def _read_schema(head: bytes, what: str) -> _ReadSchema:
    """Read the schema message that begins a stream."""
    schema = pa.ipc.open_stream(pa.py_buffer(head)).schema
    # Names are decoded here, and may be no text.
    names = schema.names
    if len(names) > COLUMNS_MAX:
        raise InvalidRequestError(f"{what}: {len(names)} columns; at most {COLUMNS_MAX}")
    for t in schema.types:
        if t.num_fields or pa.types.is_timestamp(t) or not pa.types.is_primitive(t):
            _read_texts(t, what=what, depth=1)
    # The schema is this machine's, whatever the message says of the batches.
    return _ReadSchema(schema, ipc_message.is_little_endian(head))


# Most bodies begin with the very bytes that another one began with.
_known_schema = functools.lru_cache(maxsize=_KNOWN_SCHEMAS_MAX)(_read_schema)


def _read_texts(t: pa.DataType, *, what: str, depth: int) -> None:
    """Read every text in a type: names of fields and time zones, which may be none.

    Raises `UnicodeDecodeError`, or `InvalidRequestError` for a type that nobody would walk.
    """
    if depth > DEPTH_MAX:
        raise InvalidRequestError(
            f"{what}: a column is nested more than {DEPTH_MAX} deep; no table can have it"
        )
    if pa.types.is_timestamp(t):
        assert t.tz is None or t.tz
    elif isinstance(t, pa.BaseExtensionType):
        _read_texts(t.storage_type, what=what, depth=depth + 1)
    elif pa.types.is_dictionary(t) or pa.types.is_run_end_encoded(t):
        _read_texts(t.value_type, what=what, depth=depth + 1)
    else:
        for position in range(t.num_fields):
            field = t.field(position)
            assert field.name is not None
            _read_texts(field.type, what=what, depth=depth + 1)


def _check_messages(
    found: Sequence[ipc_message.IpcMessage],
    *,
    what: str,
    rows_max: int,
    batch_bytes_max: int,
    batches_max: int,
) -> None:
    if len(found) > batches_max:
        raise RequestTooLargeError(f"{what}: more than {batches_max} batches in one request")
    rows = sum(message.row_count for message in found)
    if rows > rows_max:
        raise RequestTooLargeError(
            f"{what}: {rows} rows in one request; at most {rows_max}, send fewer"
        )
    for message in found:
        if message.kind != ipc_message.RECORD_BATCH:
            raise InvalidRequestError(
                f"{what}: dictionary-encoded columns are not accepted; send plain ones"
            )
        if message.is_compressed:
            # A few compressed bytes could ask for gigabytes; the log stores plain buffers anyway.
            raise InvalidRequestError(
                f"{what}: compressed record batches are not accepted; send them plain"
            )
        if len(message.data) > batch_bytes_max:
            raise RequestTooLargeError(
                f"{what}: a record batch has {len(message.data)} bytes;"
                f" at most {batch_bytes_max}, send smaller batches"
            )


def _read_batch(
    message: memoryview, schema: pa.Schema, foreign_head: bytes | None, *, what: str
) -> pa.RecordBatch:
    try:
        if foreign_head is None:
            # Opening a stream would read the schema once more, which takes longer than the rows.
            batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        else:
            # Only a stream swaps bytes.
            stream = b"".join((foreign_head, message))
            batch = pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch()
        # Offsets and lengths come from outside: unchecked, they would read foreign memory.
        batch.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError, StopIteration) as error:
        raise InvalidRequestError(f"{what}: unreadable batch: {error}") from error
    return batch


def _number(custom: Mapping[bytes, bytes], key: bytes, *, what: str) -> int | None:
    text = custom.get(key)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 19:
        raise InvalidRequestError(
            f"{what}: batch metadata '{key.decode()}' must be a non-negative integer"
        )
    return int(text)
