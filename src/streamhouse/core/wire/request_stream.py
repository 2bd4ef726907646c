"""Arrow IPC request bodies from outside, with limits and checks before any use.

This module does not know the schema of a table; the route checks the columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.core.wire import ipc_message

__all__ = ["RequestBatch", "RequestStream", "open_request", "plain_type"]

SCHEMA_BYTES_MAX: Final = 4 << 20
"""The most bytes of the schema of a request, names included."""
COLUMNS_MAX: Final = 2_100
"""The most columns of a table, and some system columns."""
DEPTH_MAX: Final = 100
_MADE_BATCHES_MAX: Final = 2
"""The most bytes decoded from views and dictionaries of a body, in batches of the largest size."""
# The cache of schemas takes at most two megabytes and the parsed schemas.
_KNOWN_SCHEMA_BYTES_MAX: Final = 16 << 10
_KNOWN_SCHEMAS_MAX: Final = 128


class RequestBatch(NamedTuple):
    """One record batch of a request, with its custom metadata.

    `payload` is the record batch as one little-endian IPC message. With `bucket` None the service
    chooses the bucket; `sequence` 0 means no sequence.
    """

    bucket: int | None
    sequence: int
    batch: pa.RecordBatch
    payload: memoryview


@dataclass(frozen=True, slots=True)
class RequestStream:
    """A body whose messages are within the limits.

    If `is_kept`, the next body with the same schema has the same `schema` object. The columns are
    plain: views are replaced as in `plain_type`, and dictionaries by their values.
    """

    schema: pa.Schema
    is_kept: bool
    _sent: pa.Schema
    _foreign_head: bytes | None
    """The schema's message, if the batches after it are not little-endian."""
    _messages: Sequence[ipc_message.IpcMessage]
    _what: str
    _batch_bytes_max: int
    _whole: memoryview | None = None
    """The body, if there are dictionaries: only a stream knows the dictionaries of a batch."""

    def batches(self) -> Iterator[RequestBatch]:
        """Yield every batch, validated; raises `InvalidRequestError` for a malformed one."""
        head = self._foreign_head
        is_as_sent = head is None and self._sent is self.schema
        read = None if self._whole is None else _batches_in_order(self._whole, what=self._what)
        made_bytes = 0
        for message in self._messages:
            if read is None:
                batch = _read_batch(message.data, self._sent, head, what=self._what)
            else:
                batch = next(read)
            if self._sent is not self.schema:
                made_bytes += self._made_bytes(batch)
                # All decoded batches are in memory at the same time.
                if made_bytes > _MADE_BATCHES_MAX * self._batch_bytes_max:
                    raise RequestTooLargeError(
                        f"{self._what}: the columns with views and dictionaries have more than"
                        f" {_MADE_BATCHES_MAX * self._batch_bytes_max} bytes; send less at once"
                    )
                batch = self._plain(batch)
            yield RequestBatch(
                bucket=_number(message.custom, b"bucket", what=self._what),
                sequence=_number(message.custom, b"sequence", what=self._what) or 0,
                batch=batch,
                payload=message.data if is_as_sent else memoryview(batch.serialize()).cast("B"),
            )

    def _made_bytes(self, batch: pa.RecordBatch) -> int:
        """Return the decoded bytes of the columns with views and dictionaries."""
        # Many views may share the same bytes, and many rows the same dictionary entry.
        pairs = zip(batch.columns, self.schema.types, strict=True)
        size = sum(_viewed_bytes(column, t) for column, t in pairs)
        if size > self._batch_bytes_max:
            raise RequestTooLargeError(
                f"{self._what}: a record batch has {size} bytes of strings and binaries;"
                f" at most {self._batch_bytes_max}, send smaller batches"
            )
        return size

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with the columns of `schema`."""
        pairs = zip(batch.columns, self.schema.types, strict=True)
        try:
            columns = [column if column.type == t else column.cast(t) for column, t in pairs]
        except pa.ArrowException as error:
            raise InvalidRequestError(f"{self._what}: {error}; send plain columns") from error
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _ReadSchema(NamedTuple):
    sent: pa.Schema
    plain: pa.Schema
    is_little_endian: bool


def open_request(
    body: bytes | memoryview, *, what: str, rows_max: int, batch_bytes_max: int, batches_max: int
) -> RequestStream:
    """Check the limits and read the schema; `what` begins every error, as in "append to 'db.t'".

    Raises `InvalidRequestError` for bytes which are not a plain IPC stream, and
    `RequestTooLargeError` above a limit.
    """
    view = memoryview(body).cast("B")
    # One message above the limit proves an excess, so the rest need not be read.
    messages = list(itertools.islice(ipc_message.messages(view), batches_max + 2))
    if not messages or messages[0].kind != ipc_message.SCHEMA:
        raise InvalidRequestError(
            f"{what}: the body is not an Arrow IPC stream (no schema message)"
        )
    _check_messages(
        messages[1:],
        what=what,
        rows_max=rows_max,
        batch_bytes_max=batch_bytes_max,
        batches_max=batches_max,
    )
    if len(messages[0].data) > SCHEMA_BYTES_MAX:
        raise RequestTooLargeError(
            f"{what}: the schema has {len(messages[0].data)} bytes; at most {SCHEMA_BYTES_MAX}"
        )
    head = bytes(messages[0].data)
    is_kept = len(head) <= _KNOWN_SCHEMA_BYTES_MAX
    try:
        read = (_known_schema if is_kept else _read_schema)(head, what)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what}: unreadable schema: {error}") from error
    foreign_head = None if read.is_little_endian else head
    row_messages = [message for message in messages[1:] if message.kind == ipc_message.RECORD_BATCH]
    whole = view if len(row_messages) < len(messages) - 1 else None
    return RequestStream(
        read.plain, is_kept, read.sent, foreign_head, row_messages, what, batch_bytes_max, whole
    )


def _read_schema(head: bytes, what: str) -> _ReadSchema:
    """Read the schema message at the beginning of a stream."""
    schema = pa.ipc.open_stream(pa.py_buffer(head)).schema
    # Reading the names decodes them, and fails for names which are not UTF-8.
    names = schema.names
    if len(names) > COLUMNS_MAX:
        raise InvalidRequestError(f"{what}: {len(names)} columns; at most {COLUMNS_MAX}")
    plain = [
        t
        if pa.types.is_primitive(t) and not pa.types.is_timestamp(t)
        else plain_type(_value_type(t), what=what)
        for t in schema.types
    ]
    if any(_has_dictionary(t) for t in plain):
        raise InvalidRequestError(
            f"{what}: dictionary-encoded values inside of others are not accepted; send plain ones"
        )
    as_plain = schema
    if plain != schema.types:
        as_plain = pa.schema([f.with_type(t) for f, t in zip(schema, plain, strict=True)])
    # The parsed schema has this machine's byte order; the message tells the batches' byte order.
    return _ReadSchema(schema, as_plain, ipc_message.is_little_endian(head))


# Most bodies begin with the same schema bytes as an earlier body.
_known_schema = functools.lru_cache(maxsize=_KNOWN_SCHEMAS_MAX)(_read_schema)


def _value_type(t: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary column with plain values; any other type unchanged."""
    if not pa.types.is_dictionary(t):
        return t
    value_type = t.value_type
    # Arrow has no kernels that decode views.
    is_view = pa.types.is_string_view(value_type) or pa.types.is_binary_view(value_type)
    return t if is_view or pa.types.is_nested(value_type) else value_type


def _has_dictionary(t: pa.DataType) -> bool:
    if isinstance(t, pa.BaseExtensionType):
        return _has_dictionary(t.storage_type)
    if pa.types.is_dictionary(t):
        return True
    return any(_has_dictionary(t.field(i).type) for i in range(t.num_fields))


def plain_type(t: pa.DataType, *, what: str, depth: int = 1) -> pa.DataType:
    """Return a type with large strings and binaries in place of views, which few kernels accept.

    The type is large because an array of views may hold more bytes than a normal array. All names
    of fields and time zones in the type are decoded. Raises `UnicodeDecodeError` for a malformed
    name, or `InvalidRequestError` for a type which is nested too deep or has no plain form.
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
    rebuilt = _with_fields(t, plain)
    if rebuilt is None:
        raise InvalidRequestError(f"{what}: columns of type {t} are not accepted; send plain ones")
    return rebuilt


def _with_fields(t: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType | None:
    """Return the nested type `t` with other fields; None for kinds outside of tables."""
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
    """Return the bytes behind the views in a column; `plain` is the column type without views."""
    t = column.type
    if t == plain:
        return 0
    if pa.types.is_dictionary(t):
        return _decoded_bytes(column)
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


def _decoded_bytes(column: pa.DictionaryArray) -> int:
    """Return the bytes of a dictionary column's rows after decoding."""
    values = column.dictionary
    t = values.type
    if t in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        lengths = pc.binary_length(values)
    elif pa.types.is_null(t):
        return 0
    else:
        return len(column) * ((int(t.bit_width) + 7) // 8)
    decoded = pc.sum(lengths.cast(pa.int64()).take(column.indices)).as_py()
    return int(decoded or 0) + 8 * len(column)


def _check_messages(
    messages: Sequence[ipc_message.IpcMessage],
    *,
    what: str,
    rows_max: int,
    batch_bytes_max: int,
    batches_max: int,
) -> None:
    if len(messages) > batches_max:
        raise RequestTooLargeError(f"{what}: more than {batches_max} batches in one request")
    rows = sum(message.row_count for message in messages)
    if rows > rows_max:
        raise RequestTooLargeError(
            f"{what}: {rows} rows in one request; at most {rows_max}, send fewer"
        )
    for message in messages:
        if message.kind not in (ipc_message.RECORD_BATCH, ipc_message.DICTIONARY_BATCH):
            raise InvalidRequestError(f"{what}: the body has messages that are no batches")
        if message.is_delta:
            # Arrow copies the whole dictionary for each delta.
            raise InvalidRequestError(
                f"{what}: dictionaries that grow by deltas are not accepted; send whole ones"
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


def _batches_in_order(body: memoryview, *, what: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a body with dictionaries."""
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(body))
        while True:
            batch = reader.read_next_batch()
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what}: unreadable batch: {error}") from error
    except StopIteration:
        raise InvalidRequestError(f"{what}: unreadable batch: it ends early") from None


def _number(custom: Mapping[bytes, bytes], key: bytes, *, what: str) -> int | None:
    text = custom.get(key)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 19:
        raise InvalidRequestError(
            f"{what}: batch metadata '{key.decode()}' must be a non-negative integer"
        )
    return int(text)
