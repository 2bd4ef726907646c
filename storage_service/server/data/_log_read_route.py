"""Reading the log: a fetch returns stored batches from an offset on, a subscription all new rows.

A fetch with `max_wait_ms` waits for rows. A subscription is an endless answer; rows are pushed as
soon as the rows are durable. The service keeps no queue for a subscriber, only a position for each
bucket, and reads the log from the position when the connection has space. A slow subscriber falls
behind in the log and takes no memory. A subscription ends cleanly when the service stops or the
position has left the log; a new subscription from the same position then reports the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from streamhouse.core.errors import (
    InvalidRequestError,
    LogCutError,
    OffsetOutOfRangeError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.core.model.table import VERSION_HEADER
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.engine.wakeups import ANY_BUCKET
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.server._request_service import LogRequestService
from streamhouse.storage_service.server.data._log_page import LogPage, LogReader
from streamhouse.storage_service.server.data._log_text import (
    LogForm,
    accepted_form,
    event_positions,
)
from streamhouse.storage_service.server.history.readable_offsets import lake_end
from streamhouse.storage_service.server.http._parameters import (
    fingerprints,
    integer,
    log_column_names,
    offsets,
    schema_version,
    table_id,
)
from streamhouse.storage_service.server.http.http_exchange import HttpExchange

__all__ = ["answer_fetch", "answer_subscribe"]

_logger = logging.getLogger(__name__)

_FETCH_BYTES_DEFAULT: Final = 8 << 20
# Caches and proxies must not hold back pushed rows.
_PUSHED_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_FETCH_PARAMETERS: Final = (
    "offset",
    "max_bytes",
    "max_wait_ms",
    "columns",
    "end_offset",
    "schema_id",
    "fingerprint",
    "table_id",
    "read_from",
)
_SUBSCRIBE_PARAMETERS: Final = (
    "start",
    "columns",
    "schema_id",
    "fingerprints",
    "format",
    "table_id",
)


async def answer_fetch(
    exchange: HttpExchange, service: LogRequestService, *, path: str, bucket: str
) -> None:
    """Answer rows from `offset` on; at the end of the log wait up to `max_wait_ms` for rows."""
    query = exchange.query(_FETCH_PARAMETERS)
    table = service.readable(path)
    number = integer("bucket", bucket, least=0)
    if "read_from" in query:
        _check_read_from(exchange, query)
    if "offset" not in query:
        raise InvalidRequestError(f"{exchange.path}: parameter offset is missing")
    offset = integer("offset", query["offset"], least=0)
    end_offset = None
    if "end_offset" in query:
        end_offset = integer("end_offset", query["end_offset"], least=0)
    furthest = max(offset, end_offset or 0)
    table.info.check_positions({number: furthest}, table_id=table_id(query))
    tablet = table.tablet(number)
    bytes_max = integer("max_bytes", query.get("max_bytes", str(_FETCH_BYTES_DEFAULT)), least=1)
    wait_ms = integer("max_wait_ms", query.get("max_wait_ms", "0"), least=0)
    schema_id = schema_version(query.get("schema_id"), table.info)
    columns = log_column_names(query.get("columns"), table.info, schema_id)
    if "fingerprint" in query:
        await _check_history(service, table, {number: offset}, {number: query["fingerprint"]})
    deadline = asyncio.get_running_loop().time() + min(wait_ms, service.fetch_wait_ms_max) / 1000
    while True:
        _check_offset(table, number, offset)
        end = tablet.high_watermark
        if end_offset is not None:
            end = min(end, end_offset)
        # At end_offset no wait can bring further rows.
        if offset < end or (end_offset is not None and offset >= end_offset):
            break
        if not await service.wait_for_rows(exchange, table, number, deadline=deadline):
            break
        # The token may have been revoked, and the table dropped.
        service.access.admit(exchange)
        service.check_readable(table)
    stage_ended("wait")
    form = accepted_form(exchange)
    reader = LogReader(exchange, service, table, columns=columns, schema_id=schema_id, form=form)
    bytes_max = min(bytes_max, service.config.fetch_bytes_max)
    page = await reader.page(number, offset=offset, end=end, bytes_max=bytes_max)
    stage_ended("read")
    table.read_rows += page.row_count
    service.metrics.count_sent(row_count=page.row_count, byte_count=page.byte_count)
    headers = [(VERSION_HEADER, table.info.version), *service.read_headers]
    if form is LogForm.NDJSON:
        headers.append((b"x-next-offset", b"%d" % page.next_offset))
    await exchange.answer(200, form.value, page.pieces, headers=headers)


def _check_read_from(exchange: HttpExchange, query: Mapping[str, str]) -> None:
    """Raise for a fetch that may not name who answers.

    Which process answers is decided before. Rows of a standby may be of a table that was dropped
    meanwhile, so only a fetch that names the table takes them.
    """
    if query["read_from"] not in ("owner", "any"):
        raise InvalidRequestError(f"{exchange.path}: parameter read_from is one of owner, any")
    if query["read_from"] == "any" and "table_id" not in query:
        raise InvalidRequestError(f"{exchange.path}: read_from=any needs the parameter table_id")


def _check_offset(table: ReadableTable[ReadableLog], bucket: int, offset: int) -> None:
    """Raise `OffsetOutOfRangeError` with the valid range, unless `offset` is readable."""
    tablet = table.tablet(bucket)
    start, end = tablet.log_start_offset, tablet.high_watermark
    if not start <= offset <= end:
        advice = ""
        if offset < start <= lake_end(table, bucket):
            name = f"'{table.path}$changelog'" if table.info.is_primary_key_table else "the table"
            advice = (
                f"; older rows are in the lake: read {name} with startingOffsets or"
                " startingTimestamp"
            )
        raise OffsetOutOfRangeError(
            f"table '{table.path}', bucket {bucket}: offset {offset} is outside the log, which has"
            f" offsets {start} to {end}{advice}"
        )


async def _check_history(
    service: LogRequestService,
    table: ReadableTable[ReadableLog],
    starts: Mapping[int, int],
    read_fingerprints: Mapping[int, str],
) -> None:
    """Raise `LogCutError` if rows that the client has read were replaced or lost."""
    for bucket, fingerprint in read_fingerprints.items():
        offset = starts[bucket]
        end = table.tablet(bucket).high_watermark
        if offset > end:
            raise _cut(table, bucket, f"the log has fewer rows, up to offset {end},")
        _check_offset(table, bucket, offset)
        log_fingerprint = await service.run_blocking(table.tablet(bucket).fingerprint, offset)
        if log_fingerprint is not None and log_fingerprint.hex() != fingerprint:
            raise _cut(table, bucket, f"below offset {offset} there are other rows")


def _cut(table: ReadableTable[ReadableLog], bucket: int, reason: str) -> LogCutError:
    return LogCutError(
        f"table '{table.path}', bucket {bucket}: {reason} than were read: those that were shown and"
        " not in the journal yet were lost with their machine; read again from an earlier offset,"
        " see --journal-ack in docs/journal.md"
    )


async def answer_subscribe(
    exchange: HttpExchange, service: LogRequestService, *, path: str
) -> None:
    """Stream batches of the requested buckets from the start offsets on."""
    query = exchange.query(_SUBSCRIBE_PARAMETERS)
    form = _subscribed_form(exchange, query.get("format"))
    if form is LogForm.EVENTS and (reached := exchange.header(b"last-event-id")):
        # A browser repeats the first request, with the position in an additional header.
        query = {**query, **event_positions(reached.decode("latin-1"))}
    table, stated_id = service.readable(path), table_id(query)
    # The table id is checked first: the parameters may be about a dropped table of the same name.
    table.info.check_positions({}, table_id=stated_id)
    # Fixed for the whole subscription: a change of the schema must not surprise a reader.
    schema_id = schema_version(query.get("schema_id"), table.info)
    columns = log_column_names(query.get("columns"), table.info, schema_id)
    reader = LogReader(exchange, service, table, columns=columns, schema_id=schema_id, form=form)
    positions = _start(table, query.get("start", "latest"), stated_id)
    if "fingerprints" in query:
        reader_fingerprints = fingerprints("fingerprints", query["fingerprints"], positions)
        await _check_history(service, table, positions, reader_fingerprints)
    with service.subscription(exchange):
        headers = ((b"content-type", form.value), (VERSION_HEADER, table.info.version))
        await exchange.start(200, [*headers, *_PUSHED_HEADERS])
        await _push(exchange, service, table, positions, reader)


def _subscribed_form(exchange: HttpExchange, format_name: str | None) -> LogForm:
    if format_name not in (None, "arrow", "sse"):
        raise InvalidRequestError(
            f"parameter format = '{format_name[:40]}' is not one of arrow, sse"
        )
    is_named = format_name is None and exchange.accepted((LogForm.EVENTS.value,)) is not None
    return LogForm.EVENTS if format_name == "sse" or is_named else LogForm.ARROW


def _start(table: ReadableTable[ReadableLog], text: str, stated_id: int | None) -> dict[int, int]:
    if text == "latest":
        return {b: tablet.high_watermark for b, tablet in enumerate(table.tablets)}
    if text == "earliest":
        return {b: tablet.log_start_offset for b, tablet in enumerate(table.tablets)}
    start = offsets("start", text, table.info, table_id=stated_id)
    for bucket, offset in start.items():
        _check_offset(table, bucket, offset)
    return start


async def _push(
    exchange: HttpExchange,
    service: LogRequestService,
    table: ReadableTable[ReadableLog],
    positions: dict[int, int],
    reader: LogReader,
) -> None:
    """Send pages while rows are available, then wait for rows or for the next heartbeat."""
    loop = asyncio.get_running_loop()
    heartbeat_s = service.config.subscription_heartbeat_ms / 1000
    # The first message is a heartbeat, which confirms the subscription to the client.
    heartbeat_at = loop.time()
    # A subscription may last for weeks: a token revoked meanwhile ends it.
    while (
        not service.is_draining
        and _is_readable(service, table)
        and service.access.is_still_admitted(exchange)
    ):
        is_behind = False
        for bucket, offset in positions.items():
            end = table.tablet(bucket).high_watermark
            if offset < end:
                is_behind = True
                try:
                    page = await _next_page(exchange, service, table, bucket, offset, reader)
                except OverloadedError:
                    # Answer memory is short for a while: the heartbeat keeps the client waiting.
                    await exchange.push(reader.heartbeat(positions))
                    continue
                if page is None:
                    return await exchange.finish()
                positions[bucket] = page.next_offset
                await exchange.push(reader.pushed(page, positions))
                exchange.release()
                table.read_rows += page.row_count
                service.metrics.count_sent(row_count=page.row_count, byte_count=page.byte_count)
        if is_behind:
            heartbeat_at = loop.time() + heartbeat_s
        elif loop.time() >= heartbeat_at:
            await exchange.push(reader.heartbeat(positions))
            heartbeat_at = loop.time() + heartbeat_s
        else:
            await service.wait_for_rows(exchange, table, ANY_BUCKET, deadline=heartbeat_at)
    return await exchange.finish()


def _is_readable(service: LogRequestService, table: ReadableTable[ReadableLog]) -> bool:
    try:
        service.check_readable(table)
    except StreamhouseError:
        return False
    return True


async def _next_page(
    exchange: HttpExchange,
    service: LogRequestService,
    table: ReadableTable[ReadableLog],
    bucket: int,
    offset: int,
    reader: LogReader,
) -> LogPage | None:
    """Return the page at `offset`, or None after an error that ends the subscription.

    Raises `OverloadedError` when answer memory is short.
    """
    try:
        # The push before may have waited for a slow client, and rows are overwritten meanwhile.
        service.check_readable(table)
        _check_offset(table, bucket, offset)
        return await reader.page(
            bucket,
            offset=offset,
            end=table.tablet(bucket).high_watermark,
            bytes_max=service.config.subscription_page_bytes_max,
        )
    except OverloadedError:
        raise
    except StreamhouseError as error:
        # The status line is already sent; a fetch or a new subscription reports the same error.
        _logger.warning(
            "event=subscription_ended request_id=%s code=%s", exchange.request_id, error.code
        )
        return None
