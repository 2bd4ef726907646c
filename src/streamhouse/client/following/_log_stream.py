"""A table's log as it grows, read over a series of connections."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.client.http._http_connection import AnswerStream
from streamhouse.client.http._request_routes import RouteSearch
from streamhouse.client.http._stop_signal import StopSignal
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.client.reads import (
    FETCH_BYTES_DEFAULT,
    LogBatch,
    cut,
    fetch,
    named_columns,
    named_table,
    offsets_to_text,
)
from streamhouse.core.errors import (
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.table import table_id_of
from streamhouse.core.wire.arrow_body import FetchBody, decode_fetch_body

__all__ = ["catch_up", "follow"]

_SILENCE_S_MAX: Final = 30.0


def catch_up(
    transport: HttpTransport,
    path: str,
    *,
    positions: dict[int, int],
    ends: Mapping[int, int],
    table_id: int,
    columns: Sequence[str] | None,
    reached: ReachedOffsets,
    schema_id: int | None,
    stop: StopSignal,
) -> Generator[LogBatch, None, None]:
    """Fetch the rows below `ends`, which the owner has shown, a page of each bucket in turn.

    `positions` is where to begin, and moves. Any process may answer. Raises as `fetch`.
    """
    behind = [bucket for bucket, offset in positions.items() if offset < ends.get(bucket, 0)]
    while behind:
        for bucket in tuple(behind):
            page = fetch(
                transport,
                path,
                bucket,
                positions[bucket],
                columns=columns,
                max_bytes=FETCH_BYTES_DEFAULT,
                max_wait_ms=0,
                end_offset=ends[bucket],
                reached=reached,
                table_id=table_id,
                schema_id=schema_id,
                are_stored=True,
            )
            for batch in page:
                positions[bucket] = batch.end_offset
                yield batch
                if stop.is_set():
                    return
            # Without rows the subscription goes on, and tells why.
            if not page or positions[bucket] >= ends[bucket]:
                behind.remove(bucket)


def follow(
    transport: HttpTransport,
    path: str,
    *,
    start: Mapping[int, int],
    table_id: int,
    columns: Sequence[str] | None,
    reached: ReachedOffsets,
    schema_id: int | None = None,
    stop: StopSignal,
) -> Generator[LogBatch, None, None]:
    """Follow the buckets of `start`, each from its offset in this table, until `stop` is set.

    See `StorageClient.subscribe`.
    """
    route = f"/v1/tables/{path}/subscribe"
    positions = dict(start)
    parameters = named_columns(columns)
    if schema_id is not None:
        parameters["schema_id"] = str(schema_id)
    url = transport.routes.of(route)
    search: RouteSearch | None = None
    while not stop.is_set():
        fingerprints = reached.at(path, positions)
        query = {**_query(positions, fingerprints), **named_table(table_id), **parameters}
        failure: StreamhouseError
        try:
            response = transport.open_stream(
                url, route, query=query, silence_s_max=_SILENCE_S_MAX, stop=stop
            )
            # A table that another service has adopted has a new id, and keeps its offsets.
            table_id = table_id_of(response.headers) or table_id
            for body in _bodies(response):
                if search is not None:
                    search.succeed(url)
                    search = None
                reached.note(path, body.reached)
                for address, batch in body.batches:
                    begin = positions[address.bucket]
                    part = cut(path, address, batch, start=begin, end=None, table_id=table_id)
                    if part is not None:
                        positions[part.bucket] = part.end_offset
                        transport.any_process.note_fetched(part.bucket, part.end_offset)
                        yield part
            failure = UnavailableError(f"the service ended the subscription to '{path}'")
        except (OSError, pa.ArrowException) as error:
            failure = UnavailableError(f"the subscription to '{path}' at {url} broke: {error}")
            failure.__cause__ = error
        except StreamhouseError as error:
            if not error.retriable and not isinstance(error, UnknownOutcomeError):
                raise
            failure = error
        if stop.is_set():
            return
        # A restart or a takeover is waited out: the offsets say where to resume.
        deadline = time.monotonic() + transport.timeout_s
        search = search or transport.search(route, deadline=deadline)
        step = search.after(url, failure, now=time.monotonic())
        if step is None:
            raise failure
        stop.wait(step.wait_s)
        url = step.url


def _query(positions: Mapping[int, int], fingerprints: Mapping[int, str]) -> dict[str, str]:
    query = {"start": offsets_to_text(positions)}
    if fingerprints:
        query["fingerprints"] = json.dumps({str(b): text for b, text in fingerprints.items()})
    return query


def _bodies(response: AnswerStream) -> Iterator[FetchBody]:
    """Yield the bodies that the service pushes, and close the connection at the end."""
    with contextlib.closing(response):
        source = pa.PythonFile(response, mode="r")
        while (body := decode_fetch_body(source)) is not None:
            yield body
