"""Arrow IPC bodies of the data routes.

Append request: one stream with the table's schema; the IPC custom metadata of a batch may have
`bucket` and `sequence`. Fetch response: one stream whose schema metadata has the log address of
each batch (`streamhouse.batches`) and the positions of the read (`streamhouse.positions`).

The log stores the record batch messages of the client: the bytes go from the request to the disk to
the response unchanged.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.casts.conform import check_nulls, check_schema, conform
from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema import Schema
from streamhouse.core.wire import ipc_message
from streamhouse.core.wire.request_stream import RequestBatch, RequestStream

__all__ = [
    "BatchAddress",
    "FetchBody",
    "decode_append",
    "decode_fetch_body",
    "decode_payload",
    "encode_append_body",
    "encode_fetch_body",
    "encode_payload",
    "project_payload",
]

BATCHES_KEY: Final = b"streamhouse.batches"
POSITIONS_KEY: Final = b"streamhouse.positions"
# For longer texts, the rows of the page take longer than the head.
_SHORT_TEXT_BYTES_MAX: Final = 1_024

# Without options, Arrow reads the environment, which takes as long as writing a row.
_OPTIONS: Final = pa.ipc.IpcWriteOptions()


class BatchAddress(NamedTuple):
    """The address of a fetched batch: offsets base_offset .. base_offset + row_count - 1."""

    bucket: int
    base_offset: int
    row_count: int
    timestamp_us: int
    schema_id: int


class FetchBody(NamedTuple):
    """A decoded fetch response: whole stored batches; positions: bucket -> (start, watermark).

    `reached`: bucket -> (offset after the batches, the log's fingerprint there), if present.
    """

    batches: Sequence[tuple[BatchAddress, pa.RecordBatch]]
    positions: Mapping[int, tuple[int, int]]
    reached: Mapping[int, tuple[int, str]]


def encode_append_body(
    schema: pa.Schema, parts: Iterable[tuple[int | None, int, pa.RecordBatch]]
) -> pa.Buffer:
    """Encode (bucket, sequence, batch) parts as one append request body; sequence 0 means none."""
    sink = pa.BufferOutputStream()
    # Schema metadata of callers, which is long in pandas, is left out.
    with pa.ipc.new_stream(sink, schema.remove_metadata(), options=_OPTIONS) as writer:
        for bucket, sequence, batch in parts:
            metadata = {} if bucket is None else {"bucket": str(bucket)}
            if sequence:
                metadata["sequence"] = str(sequence)
            writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue()


def decode_append(stream: RequestStream, schema: Schema, *, table: str) -> list[RequestBatch]:
    """Decode and check all rows of an append, before any row is stored.

    Every batch has the columns of `schema`, and its payload is ready for the log.

    Raises `InvalidRequestError` for malformed batches, and `SchemaMismatchError` or
    `UnknownColumnError` for rows which do not fit.
    """
    if stream.is_kept:
        is_exact = _is_known_exact(Same(stream.schema), Same(schema), table)
    else:
        is_exact = _is_exact(stream.schema, schema, table)
    parts = []
    for read in stream.batches():
        if is_exact:
            check_nulls(read.batch, schema, table=table)
        else:
            batch = conform(read.batch, schema, table=table)
            read = read._replace(batch=batch, payload=memoryview(batch.serialize()).cast("B"))
        if read.batch.num_rows:
            parts.append(read)
    return parts


def _is_exact(sent: pa.Schema, schema: Schema, table: str) -> bool:
    """Whether rows of the schema `sent` can be stored unchanged; raises if they do not fit."""
    check_schema(sent, schema, table=table)
    exact = schema.to_arrow()
    return bool(sent.names == exact.names and sent.types == exact.types)


@functools.lru_cache(maxsize=256)
def _is_known_exact(sent: Same, schema: Same, table: str) -> bool:
    return _is_exact(sent.value, schema.value, table)


def encode_payload(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the IPC message for `batch` in the log."""
    return batch.serialize()


def decode_payload(payload: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Read a stored record batch message without copying; the caller has checked its checksum."""
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"a stored record batch is unreadable: {error}") from error


def project_payload(payload: memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Buffer:
    """Return a stored record batch message with only `columns`."""
    return decode_payload(payload, schema).select(list(columns)).serialize()


def encode_fetch_body(
    schema: pa.Schema,
    batches: Sequence[tuple[BatchAddress, pa.Buffer | memoryview]],
    *,
    positions: Mapping[int, tuple[int, int]],
    reached: Mapping[int, tuple[int, str]] | None = None,
) -> list[pa.Buffer | memoryview | bytes]:
    """Return the pieces of one IPC stream around stored payloads, without copying them."""
    # Written by hand: `json.dumps` takes longer than all other work for a small response.
    addresses = ",".join(f"[{','.join(map(str, address))}]" for address, _ in batches)
    seen = ", ".join(f'"{b}": [{start}, {end}]' for b, (start, end) in positions.items())
    if reached:
        # Older clients read only the first two values of each bucket.
        seen = ", ".join(
            json.dumps({str(b): [*positions[b], *where]})[1:-1] for b, where in reached.items()
        )
    head = _fetch_head(schema, f"[{addresses}]".encode(), f"{{{seen}}}".encode())
    return [head, *(payload for _, payload in batches), ipc_message.END_OF_STREAM]


def _fetch_head(schema: pa.Schema, addresses: bytes, positions: bytes) -> pa.Buffer | bytes:
    """Return the schema message with both texts in its metadata; short texts end in spaces."""
    longest = max(len(addresses), len(positions))
    if longest > _SHORT_TEXT_BYTES_MAX:
        return schema.with_metadata({BATCHES_KEY: addresses, POSITIONS_KEY: positions}).serialize()
    room = max(64, 1 << (longest - 1).bit_length())
    texts = {BATCHES_KEY: addresses.ljust(room), POSITIONS_KEY: positions.ljust(room)}
    return _head_with_room(Same(schema), room) % texts


@functools.lru_cache(maxsize=64)
def _head_with_room(schema: Same, room: int) -> bytes:
    """Return a schema message with format placeholders for two texts of `room` bytes each."""
    # Random letters occur nowhere else in the message.
    texts = {key: secrets.token_hex(room // 2) for key in (BATCHES_KEY, POSITIONS_KEY)}
    message: bytes = schema.value.with_metadata(texts).serialize().to_pybytes()
    message = message.replace(b"%", b"%%")
    for key, text in texts.items():
        message = message.replace(text.encode(), b"%%(%b)b" % key)
    return message


def decode_fetch_body(source: Any) -> FetchBody | None:
    """Read one fetch response from a buffer or file-like object; None at the end of the input."""
    try:
        reader = pa.ipc.open_stream(source)
    except pa.ArrowInvalid as error:
        if "empty stream" in str(error) or "null or length 0" in str(error):
            return None
        raise CorruptDataError(f"the service's answer is not an Arrow stream: {error}") from error
    metadata = reader.schema.metadata or {}
    if BATCHES_KEY not in metadata or POSITIONS_KEY not in metadata:
        raise CorruptDataError("the service's answer does not say which offsets it holds")
    batches = []
    for fields in json.loads(metadata[BATCHES_KEY]):
        address = BatchAddress(*fields)
        batch = reader.read_next_batch()
        if batch.num_rows != address.row_count:
            raise CorruptDataError(
                f"bucket {address.bucket}, offset {address.base_offset}: {batch.num_rows} rows,"
                f" not {address.row_count}"
            )
        batches.append((address, batch.replace_schema_metadata(None)))
    # Reading the end marker leaves a shared source at the first byte of the next response.
    for _ in reader:
        raise CorruptDataError("the service's answer has more batches than it lists")
    entries = {int(bucket): p for bucket, p in json.loads(metadata[POSITIONS_KEY]).items()}
    positions = {bucket: (p[0], p[1]) for bucket, p in entries.items()}
    reached = {bucket: (p[2], p[3]) for bucket, p in entries.items() if len(p) > 3}
    return FetchBody(batches=batches, positions=positions, reached=reached)
