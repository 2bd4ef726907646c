"""Produce and InitProducerId: records come in.

Every partition is answered for itself. All of a request are stored at the same time, mostly in one
commit; those of one connection in the order of its requests. `acks` 1 and -1 are the same here:
durable. A client that asks for no answer (`acks` 0) learns of an error by the end of its
connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    InternalError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault, is_bug
from streamhouse.storage_service.kafka.messages.produce_answer import (
    PRODUCE_VERSIONS,
    StoredPartition,
    produce_answer,
)
from streamhouse.storage_service.kafka_door._api import Answer, Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._error_codes import is_repeated, produce_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door._topic_places import path_here
from streamhouse.storage_service.kafka_door.producing._decoding import (
    TRANSACTIONS,
    Decoded,
    InlineBounds,
    RefusedRecordsError,
    decoded,
    decoded_inline,
    decoded_together,
    inline_bounds,
    inline_share,
    share_of_pass,
    tried_bytes,
    working_bytes,
)
from streamhouse.storage_service.kafka_door.producing._produced import NO_OFFSET, keep_place, store
from streamhouse.storage_service.kafka_door.topics._topic_tables import topic_table
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.history.readable_offsets import readable_offsets
from streamhouse.storage_service.server.http.body_memory import HeldBody
from streamhouse.storage_service.server.http.http_exchange import short
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["PRODUCE_APIS"]

_logger = logging.getLogger(__name__)

TOPIC_CHARACTERS_MAX: Final = 260
_ACKS: Final = (-1, 0, 1)
_PRODUCER_ID_BITS: Final = 63
_STORES_AT_ONCE: Final = 32
_DECODES_AT_ONCE: Final = 32
# What is larger is decoded on a thread, where it is one of many.
_SMALL_BATCH_BYTES: Final = 64 << 10


@dataclass(slots=True)
class _Part:
    """One partition of a request, and what becomes of it."""

    topic: str
    partition: int
    records: bytes | None
    table: OpenTable | None = None
    batch: Decoded | None = None
    base_offset: int = NO_OFFSET
    error: StreamhouseError | None = None


async def _answer_produce(exchange: KafkaExchange, request: Any) -> Answer:
    """Store records; they are durable and visible when the answer is sent."""
    if request.acks not in _ACKS:
        exchange.note(ErrorCode.invalid_required_acks)
        return _refuse(
            request, ErrorCode.invalid_required_acks, f"acks = {request.acks} is not -1, 0 or 1"
        )
    mentions = ((topic.name, part) for topic in request.topic_data for part in topic.partition_data)
    parts = [_Part(topic, part.index, part.records) async for topic, part in in_slices(mentions)]
    received = sum(len(part.records) for part in parts if part.records is not None)
    exchange.service.metrics.received_bytes.inc(received)
    await _refuse_repeated(parts)
    with exchange.service.body_memory.body(exchange.share) as held:
        # What its rows take is received by nobody.
        held.end()
        await _decode_all(exchange, request, parts, held)
        await exchange.my_turn()
        await _store_all(exchange, parts)
    if request.acks == 0:
        _end_if_refused(parts)
        return None
    return await _answer(exchange, request, parts)


async def _answer_init_producer_id(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with a new producer: an id that nobody else has, in its first epoch.

    As a broker does for producers without transactions, whatever they were before. Nothing is kept:
    a producer is known by what it stores.
    """
    if request.transactional_id is not None:
        code = ErrorCode.transactional_id_authorization_failed
        exchange.note(code)
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"producer_id": secrets.randbits(_PRODUCER_ID_BITS), "producer_epoch": 0}


async def _refuse_repeated(parts: Sequence[_Part]) -> None:
    """Refuse a partition that is named twice: no producer does, and none says what it means.

    So a request has no more batches than there are buckets, each of which is a write of its own.
    """
    by_place: dict[tuple[str, int], list[_Part]] = {}
    async for part in in_slices(parts):
        named = by_place.setdefault((part.topic, part.partition), [])
        named.append(part)
        if len(named) > 1:
            error = InvalidRecordsError(
                f"partition {part.partition} is named twice; send one batch of it at a time"
            )
            named[0].error = part.error = error


async def _decode_all(
    exchange: KafkaExchange, request: Any, parts: Sequence[_Part], held: HeldBody
) -> None:
    """Make rows of the records of all parts: of large ones on several threads at a time.

    Small ones are read together with others of their table, also of other requests.
    """
    async for part in in_slices(parts):
        _find_table(exchange, request, part)
    readable = [part for part in parts if part.error is None]
    is_soon_done = await _share_of_all(exchange, readable) <= 1
    # Who is alone, and was so before, waits for nobody.
    has_others = len(parts) > 1 or exchange.service.open_requests > 1
    has_others = has_others or exchange.broker.decoding.had_company
    together: list[tuple[_Part, int, asyncio.Future[Decoded | None]]] = []
    async with asyncio.TaskGroup() as at_once:
        async for part in in_slices(readable):
            bounds = _bounds(exchange, part)
            alone = bounds.bytes_max // len(readable)
            if not is_soon_done:
                small = bounds._replace(bytes_max=min(bounds.bytes_max, _SMALL_BATCH_BYTES))
                is_one_of_many = len(parts) > _DECODES_AT_ONCE
                is_small = is_one_of_many and inline_share(part.records or b"", small) <= 1
                alone = small.bytes_max if is_small else 0
            if not alone:
                at_once.create_task(_decode(exchange, part, held, alone))
            elif has_others and (share := share_of_pass(part.records or b"", bounds)):
                together.append((part, alone, _begin_together(exchange, part, share)))
            else:
                # What waits for nobody needs no task of its own.
                await _decode(exchange, part, held, alone)
    for part, alone, reading in together:
        part.batch = await reading
        await _decode(exchange, part, held, alone)


def _bounds(exchange: KafkaExchange, part: _Part) -> InlineBounds:
    assert part.table is not None
    return inline_bounds(part.table.info, exchange.service.config)


async def _share_of_all(exchange: KafkaExchange, parts: Sequence[_Part]) -> float:
    """Return how much all batches are of what is soon read."""
    share = 0.0
    async for part in in_slices(parts):
        share += inline_share(part.records or b"", _bounds(exchange, part))
    return share


def _find_table(exchange: KafkaExchange, request: Any, part: _Part) -> None:
    """Find the table of a part, or say why nothing of it is stored."""
    if part.error is not None:
        return
    try:
        if getattr(request, "transactional_id", None) is not None:
            raise UnsupportedError(TRANSACTIONS)
        path = topic_table(exchange, part.topic, Level.WRITE).path
        part.table = table = exchange.service.table(str(path))
        # Of a table's buckets the last one has the greatest number.
        table.tablet(part.partition)
        if not part.records:
            raise InvalidRecordsError(f"no records came for partition {part.partition}")
    except StreamhouseError as error:
        # The frames of thousands of errors would be as much for the collector to look through.
        part.error = error.with_traceback(None)


def _begin_together(
    exchange: KafkaExchange, part: _Part, share: float
) -> asyncio.Future[Decoded | None]:
    """Have the records of a part read beside those that wait, too; None: they are read alone."""
    table, config = part.table, exchange.service.config
    assert table is not None
    assert part.records is not None

    def read(batches: Sequence[tuple[bytes, int]]) -> Sequence[Decoded | None]:
        return decoded_together(batches, table.info, config, table.record_schemas.source())

    batch = part.records, part.partition
    return exchange.broker.decoding.begin(table, batch, share=share, work=read)


async def _store_all(exchange: KafkaExchange, parts: Sequence[_Part]) -> None:
    """Store all parts: they begin in their order, and before anything of the next request does."""
    storing = []
    async for part in in_slices(parts):
        if part.error is not None and not _keeps_place(part):
            _report(exchange, part)
            continue
        storing.append(asyncio.create_task(_store(exchange, part)))
        if len(storing) % _STORES_AT_ONCE == 0:
            # So many have begun, and the others have their turns.
            await asyncio.sleep(0)
    exchange.pass_turn()
    await (storing[0] if len(storing) == 1 else asyncio.gather(*storing))


def _keeps_place(part: _Part) -> bool:
    """Whether a part that is refused may be one of a producer that repeats it later."""
    return part.error is not None and is_repeated(part.error) and bool(part.records)


async def _decode(exchange: KafkaExchange, part: _Part, held: HeldBody, inline_max: int) -> None:
    """Make rows of the records of a part, unless that is done, or say what is wrong with them."""
    assert part.table is not None
    try:
        if part.batch is None:
            part.batch = await _decoded(exchange, part.table, part, inline_max)
        if not held.adds_at_once(part.batch.nbytes):
            raise held.refusal()
    except StreamhouseError as error:
        part.error = error.with_traceback(None)
    except BaseException as error:  # outermost for a partition: the others are stored
        if not is_bug(error):
            raise
        _logger.exception("event=bug route=%s", exchange.route)
        part.error = InternalError("reading the records failed; the service's log says why")


async def _decoded(
    exchange: KafkaExchange, table: OpenTable, part: _Part, inline_max: int
) -> Decoded:
    """Make rows of records: here if that is soon done, else on a worker thread.

    What that takes of memory is reserved before it begins.
    """
    assert part.records is not None
    service, config = exchange.service, exchange.service.config
    arguments = (
        *(part.records, table.info, part.partition, config),
        table.record_schemas.source(),
    )
    if inline_max:
        found = decoded_inline(*arguments, inline_max)
        if found is not None:
            return found
    for bytes_max in tried_bytes(part.records, config, inline_max=inline_max):
        async with exchange.broker.working.room(working_bytes(table.info, bytes_max)):
            try:
                return await service.run_blocking(decoded, *arguments, bytes_max)
            except InvalidRecordsError as error:
                if error.fault is not RecordsFault.TOO_LARGE:
                    raise
                refusal = error.with_traceback(None)
    raise refusal


async def _store(exchange: KafkaExchange, part: _Part) -> None:
    """Store what was decoded; what is refused for now keeps its place in the producer's order."""
    service, table, refused = exchange.service, part.table, exchange.client.refused
    producers = None if table is None else exchange.broker.producers.of(table)
    try:
        if part.error is None:
            assert part.batch is not None
            assert table is not None
            assert producers is not None
            stored = await store(service, table, part.batch, producers, refused)
            part.base_offset = stored.base_offset
            if not stored.is_write:
                # It is so as this process sees it: it may be otherwise elsewhere by now.
                exchange.tenure = service.tenure
        elif part.records and is_repeated(part.error):
            await keep_place(
                producers,
                refused,
                path=path_here(service.manager, part.topic) if table is None else table.path,
                records=part.records,
                partition=part.partition,
                is_damaged=produce_code_of(part.error) is ErrorCode.corrupt_message,
            )
    except StreamhouseError as error:
        part.error = error
    except Exception:  # outermost for a partition: the others have their answers
        _logger.exception("event=bug route=%s", exchange.route)
        part.error = InternalError("storing the records failed; the service's log says why")
    _report(exchange, part)


def _report(exchange: KafkaExchange, part: _Part) -> None:
    if part.error is not None:
        exchange.note(produce_code_of(part.error))
        exchange.path = f"{exchange.api.name} {part.topic[:TOPIC_CHARACTERS_MAX]}"
        exchange.report(part.error)


async def _answer(exchange: KafkaExchange, request: Any, parts: Sequence[_Part]) -> Answer:
    if all(part.error is None for part in parts):
        all_stored = iter([_stored(exchange, part) async for part in in_slices(parts)])
        stored = [
            (topic.name, list(itertools.islice(all_stored, len(topic.partition_data))))
            for topic in request.topic_data
        ]
        return [produce_answer(exchange.api_version, stored)]
    answered = iter([_part_answer(exchange, part) async for part in in_slices(parts)])
    return {
        "responses": [
            {
                "name": topic.name,
                "partition_responses": list(itertools.islice(answered, len(topic.partition_data))),
            }
            for topic in request.topic_data
        ]
    }


def _stored(exchange: KafkaExchange, part: _Part) -> StoredPartition:
    return StoredPartition(part.partition, part.base_offset, _log_start_offset(exchange, part))


def _part_answer(exchange: KafkaExchange, part: _Part) -> Mapping[str, Any]:
    values: dict[str, Any] = {
        "index": part.partition,
        "base_offset": part.base_offset,
        "log_start_offset": _log_start_offset(exchange, part),
    }
    error = part.error
    if error is None:
        return values
    told = error.told if isinstance(error, RefusedRecordsError) else ()
    return values | {
        "error_code": produce_code_of(error),
        "error_message": short(error.message),
        "record_errors": [
            {"batch_index": number, "batch_index_error_message": short(reason)}
            for number, reason in told
        ],
    }


def _log_start_offset(exchange: KafkaExchange, part: _Part) -> int:
    table = part.table
    if table is None or not 0 <= part.partition < len(table.tablets):
        return NO_OFFSET
    has_history = exchange.service.lake_reads is not None
    return readable_offsets(table, part.partition, has_history=has_history).start


def _refuse(request: Any, code: ErrorCode, message: str) -> Mapping[str, Any]:
    """Return the answer that says of every partition what is wrong with the request."""
    if request.acks == 0:
        raise ConnectionEnded(message)
    return {
        "responses": [
            {
                "name": topic.name,
                "partition_responses": [
                    {
                        "index": part.index,
                        "error_code": code,
                        "base_offset": NO_OFFSET,
                        "error_message": message,
                    }
                    for part in topic.partition_data
                ],
            }
            for topic in request.topic_data
        ]
    }


def _end_if_refused(parts: Sequence[_Part]) -> None:
    for part in parts:
        if part.error is not None:
            raise ConnectionEnded(f"topic '{part.topic}': {part.error.message}")


PRODUCE_APIS: Final = (
    Api(
        key=0,
        name="produce",
        versions=PRODUCE_VERSIONS,
        # Older librdkafka compresses nothing for a broker that has no version 0 (KAFKA-18659).
        first_told=0,
        answer=_answer_produce,
        refuse=_refuse,
        is_write=True,
    ),
    Api(key=22, name="init_producer_id", versions=(0, 5), answer=_answer_init_producer_id),
)
