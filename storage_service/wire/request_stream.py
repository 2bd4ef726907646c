"""Arrow IPC request bodies as they come from outside: bounded and checked before they are believed.

Nothing here knows a table's schema; what the columns must be is the route's business.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.storage_service.wire import ipc_message

__all__ = ["RequestBatch", "RequestStream", "open_request", "plain_type"]

SCHEMA_BYTES_MAX: Final = 4 << 20
"""The most that the schema of a request may have, names included."""
COLUMNS_MAX: Final = 2_100
"""A table's most columns and what may come beside them."""
DEPTH_MAX: Final = 100
# What is remembered takes two megabytes and what is made of it, whatever is sent.
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

    A schema that `is_kept` is the very object that the next body with the same schema has. Where
    the body has views it has what they are views of; see `plain_type`.
    """

    schema: pa.Schema
    is_kept: bool
    _sent: pa.Schema
    _foreign_head: bytes | None
    """The schema's message, if the batches after it are not little-endian."""
    _messages: Sequence[ipc_message.IpcMessage]
    _what: str
    _batch_bytes_max: int

    def batches(self) -> Iterator[RequestBatch]:
        """Yield every batch, validated; raises `InvalidRequestError` for a malformed one."""
        head = self._foreign_head
        is_as_sent = head is None and self._sent is self.schema
        for message in self._messages:
            batch = _read_batch(message.data, self._sent, head, what=self._what)
            if self._sent is not self.schema:
                batch = self._without_views(batch)
            yield RequestBatch(
                bucket=_number(message.custom, b"bucket", what=self._what),
                sequence=_number(message.custom, b"sequence", what=self._what) or 0,
                batch=batch,
                payload=message.data if is_as_sent else memoryview(batch.serialize()).cast("B"),
            )

    def _without_views(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with the columns of `schema`."""
        pairs = list(zip(batch.columns, self.schema.types, strict=True))
        # Any number of views may be of the same bytes.
        size = sum(_viewed_bytes(column, t) for column, t in pairs)
        if size > self._batch_bytes_max:
            raise RequestTooLargeError(
                f"{self._what}: a record batch has {size} bytes of strings and binaries;"
                f" at most {self._batch_bytes_max}, send smaller batches"
            )
        columns = [column if column.type == t else column.cast(t) for column, t in pairs]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _ReadSchema(NamedTuple):
    sent: pa.Schema
    plain: pa.Schema
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
        read = (_known_schema if is_kept else _read_schema)(head, what)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what}: unreadable schema: {error}") from error
    foreign_head = None if read.is_little_endian else head
    return RequestStream(
        read.plain, is_kept, read.sent, foreign_head, found[1:], what, batch_bytes_max
    )


def _read_schema(head: bytes, what: str) -> _ReadSchema:
    """Read the schema message that begins a stream."""
    schema = pa.ipc.open_stream(pa.py_buffer(head)).schema
    # Names are decoded here, and may be no text.
    names = schema.names
    if len(names) > COLUMNS_MAX:
        raise InvalidRequestError(f"{what}: {len(names)} columns; at most {COLUMNS_MAX}")
    plain = [
        t if pa.types.is_primitive(t) and not pa.types.is_timestamp(t) else plain_type(t, what=what)
        for t in schema.types
    ]
    as_plain = schema
    if plain != schema.types:
        as_plain = pa.schema([f.with_type(t) for f, t in zip(schema, plain, strict=True)])
    # The schema is this machine's, whatever the message says of the batches.
    return _ReadSchema(schema, as_plain, ipc_message.is_little_endian(head))


# Most bodies begin with the very bytes that another one began with.
_known_schema = functools.lru_cache(maxsize=_KNOWN_SCHEMAS_MAX)(_read_schema)


def plain_type(t: pa.DataType, *, what: str, depth: int = 1) -> pa.DataType:
    """Return a type with large strings and binaries in place of views: Arrow's kernels know few.

    Large ones, because an array of views may be of more bytes than others can have. Every text in
    the type is read, which may be none: names of fields and time zones. Raises
    `UnicodeDecodeError`, or `InvalidRequestError` for a type that nobody would walk, or whose rows
    cannot be moved.
    """
    if depth > DEPTH_MAX:
        raise InvalidRequestError(
            f"{what}: a column is nested more than {DEPTH_MAX} deep; no table can have it"
        )
    if pa.types.is_timestamp(t):
        assert t.tz is None or t.tz
        return t
    if pa.types.is_string_view(t):
        return pa.large_string()
    if pa.types.is_binary_view(t):
        return pa.large_binary()
    if isinstance(t, pa.BaseExtensionType):
        inside = [pa.field("", t.storage_type)]
    elif pa.types.is_dictionary(t) or pa.types.is_run_end_encoded(t):
        inside = [pa.field("", t.value_type)]
    else:
        inside = [t.field(position) for position in range(t.num_fields)]
    plain = []
    for field in inside:
        assert field.name is not None
        plain.append(field.with_type(plain_type(field.type, what=what, depth=depth + 1)))
    if plain == inside and not pa.types.is_run_end_encoded(t):
        return t
    made = _with_fields(t, plain)
    if made is None:
        raise InvalidRequestError(f"{what}: columns of type {t} are not accepted; send plain ones")
    return made


def _with_fields(t: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType | None:
    """Return the nested type `t` with other fields; None for kinds that no table has."""
    if pa.types.is_struct(t):
        return pa.struct(fields)
    if pa.types.is_map(t):
        return pa.map_(*fields[0].type, keys_sorted=t.keys_sorted)
    if pa.types.is_list(t):
        return pa.list_(fields[0])
    if pa.types.is_large_list(t):
        return pa.large_list(fields[0])
    if pa.types.is_fixed_size_list(t):
        return pa.list_(fields[0], t.list_size)
    return None


def _viewed_bytes(column: pa.Array, plain: pa.DataType) -> int:
    """Return how many bytes the views in a column, whose type without them is `plain`, are of."""
    t = column.type
    if t == plain:
        return 0
    if pa.types.is_string_view(t) or pa.types.is_binary_view(t):
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        lengths = views[column.offset : column.offset + len(column), 0]
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        return int(lengths.sum(where=valid, dtype=np.int64))
    if pa.types.is_struct(t):
        fields = range(t.num_fields)
        return sum(_viewed_bytes(column.field(i), plain.field(i).type) for i in fields)
    if pa.types.is_map(t):
        keys = _viewed_bytes(column.keys, plain.key_type)
        return keys + _viewed_bytes(column.items, plain.item_type)
    return _viewed_bytes(column.values, plain.value_type)


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
