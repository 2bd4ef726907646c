"""Arrow IPC request bodies as they come from outside: bounded and checked before they are believed.

Nothing here knows a table's schema; what the columns must be is the route's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.storage_service.wire import ipc_message

__all__ = ["RequestBatch", "RequestStream", "open_request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """One record batch of a request, with what its custom metadata says.

    `message` is the record batch message as it came; `bucket` None lets the service decide, and
    `sequence` 0 is none.
    """

    bucket: int | None
    sequence: int
    batch: pa.RecordBatch
    message: memoryview


@dataclass(frozen=True, slots=True)
class RequestStream:
    """A body whose messages are within the limits; `batches` may be read once."""

    schema: pa.Schema
    _reader: pa.ipc.RecordBatchStreamReader
    _messages: Sequence[ipc_message.IpcMessage]
    _what: str

    def batches(self) -> Iterator[RequestBatch]:
        """Yield every batch, validated; raises `InvalidRequestError` for a malformed one."""
        for message in self._messages:
            batch, metadata = _read_batch(self._reader, what=self._what)
            yield RequestBatch(
                bucket=_metadata_int(metadata, b"bucket", what=self._what),
                sequence=_metadata_int(metadata, b"sequence", what=self._what) or 0,
                batch=batch,
                message=message.data,
            )


def open_request(
    body: bytes | memoryview, *, what: str, rows_max: int, batch_bytes_max: int, batches_max: int
) -> RequestStream:
    """Check the limits and read the schema; `what` begins every error, as in "append to 'db.t'".

    Raises `InvalidRequestError` for bytes that are no plain IPC stream, `RequestTooLargeError` over
    a limit.
    """
    view = memoryview(body).cast("B")
    found = list(ipc_message.messages(view))
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
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(view))
        # Names are decoded here, and may be no text.
        assert reader.schema.names is not None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what}: unreadable schema: {error}") from error
    return RequestStream(reader.schema, reader, found[1:], what)


def _check_messages(
    found: Sequence[ipc_message.IpcMessage],
    *,
    what: str,
    rows_max: int,
    batch_bytes_max: int,
    batches_max: int,
) -> None:
    if len(found) > batches_max:
        raise RequestTooLargeError(
            f"{what}: {len(found)} batches in one request; at most {batches_max}"
        )
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
    reader: pa.ipc.RecordBatchStreamReader, *, what: str
) -> tuple[pa.RecordBatch, Mapping[bytes, bytes]]:
    try:
        batch, metadata = reader.read_next_batch_with_custom_metadata()
        # Offsets and lengths come from outside: unchecked, they would read foreign memory.
        batch.validate(full=True)
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise InvalidRequestError(f"{what}: unreadable batch: {error}") from error
    return batch, {} if metadata is None else metadata


def _metadata_int(metadata: Mapping[bytes, bytes], key: bytes, *, what: str) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 19:
        raise InvalidRequestError(
            f"{what}: batch metadata '{key.decode()}' must be a non-negative integer"
        )
    return int(text)
