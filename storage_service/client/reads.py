"""Reading the log: fetch pages, read exact ranges, follow a table as it grows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
import urllib3

from streamhouse.storage_service.client.log_batch import LogBatch, cut_batch
from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.errors import (
    CorruptDataError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.wire.arrow_body import decode_fetch_body

__all__ = ["FETCH_BYTES_DEFAULT", "fetch", "read_range", "subscribe"]

FETCH_BYTES_DEFAULT: Final = 8 << 20
_SILENCE_S_MAX: Final = 30.0
_RECONNECT_WAIT_S: Final = 0.2


def fetch(
    transport: HttpTransport,
    path: str,
    bucket: int,
    offset: int,
    *,
    columns: Sequence[str] | None,
    max_bytes: int,
    max_wait_ms: int,
    end_offset: int | None,
    schema_id: int | None = None,
    node: str = "",
) -> list[LogBatch]:
    """See `StorageClient.fetch`."""
    query = {
        "offset": str(offset),
        "max_bytes": str(max_bytes),
        "max_wait_ms": str(max_wait_ms),
    }
    if columns is not None:
        query["columns"] = json.dumps(list(columns))
    if end_offset is not None:
        query["end_offset"] = str(end_offset)
    if schema_id is not None:
        query["schema_id"] = str(schema_id)
    data = transport.request(
        "GET",
        f"/v1/tables/{path}/buckets/{bucket}/fetch",
        query=query,
        is_repeatable=True,
        node=node,
        wait_s=max_wait_ms / 1000,
    )
    body = decode_fetch_body(pa.py_buffer(data))
    if body is None:
        raise CorruptDataError(f"fetch of '{path}' bucket {bucket} answered an empty body")
    cuts = (cut_batch(a, batch, start=offset, end=end_offset) for a, batch in body.batches)
    return [cut for cut in cuts if cut is not None]


def read_range(
    transport: HttpTransport,
    path: str,
    bucket: int,
    start: int,
    end: int,
    *,
    columns: Sequence[str] | None,
    page_bytes: int,
    schema_id: int | None = None,
    node: str = "",
) -> Iterator[LogBatch]:
    """See `StorageClient.read_range`."""
    position = start
    while position < end:
        page = fetch(
            transport,
            path,
            bucket,
            position,
            columns=columns,
            max_bytes=page_bytes,
            max_wait_ms=0,
            end_offset=end,
            schema_id=schema_id,
            node=node,
        )
        if not page:
            raise CorruptDataError(
                f"table '{path}', bucket {bucket}: no rows at offset {position}, wanted up to {end}"
            )
        for batch in page:
            if batch.base_offset != position:
                raise CorruptDataError(
                    f"table '{path}', bucket {bucket}: rows at {batch.base_offset} follow offset"
                    f" {position}"
                )
            position = batch.end_offset
            yield batch


def subscribe(
    transport: HttpTransport,
    path: str,
    *,
    start: Mapping[int, int],
    columns: Sequence[str] | None,
    schema_id: int | None = None,
) -> Iterator[LogBatch]:
    """Follow the buckets of `start`, each from its offset; see `StorageClient.subscribe`."""
    positions = dict(start)
    broken_since: float | None = None
    while True:
        query = {"start": offsets_to_text(positions)}
        if columns is not None:
            query["columns"] = json.dumps(list(columns))
        if schema_id is not None:
            query["schema_id"] = str(schema_id)
        failure: StreamhouseError
        try:
            response = transport.open_stream(
                f"/v1/tables/{path}/subscribe", query=query, silence_s_max=_SILENCE_S_MAX
            )
            with contextlib.closing(response):
                source = pa.PythonFile(response, mode="r")
                while (body := decode_fetch_body(source)) is not None:
                    broken_since = None
                    for address, batch in body.batches:
                        cut = cut_batch(address, batch, start=positions[address.bucket], end=None)
                        if cut is not None:
                            positions[cut.bucket] = cut.end_offset
                            yield cut
            failure = UnavailableError(f"the service ended the subscription to '{path}'")
        except (urllib3.exceptions.HTTPError, OSError, pa.ArrowException) as error:
            failure = UnavailableError(
                f"the subscription to '{path}' at {transport.endpoint} broke: {error}"
            )
        except StreamhouseError as error:
            if not error.retriable and not isinstance(error, UnknownOutcomeError):
                raise
            failure = error
        # A restart of the service is ridden out: offsets say where to go on.
        broken_since = broken_since or time.monotonic()
        if time.monotonic() - broken_since > transport.timeout_s:
            raise failure
        time.sleep(_RECONNECT_WAIT_S)


def offsets_to_text(offsets: Mapping[int, int]) -> str:
    """Return bucket -> offset as the JSON object that query parameters carry."""
    return json.dumps({str(bucket): offset for bucket, offset in sorted(offsets.items())})
