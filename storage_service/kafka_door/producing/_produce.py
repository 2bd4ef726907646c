"""Produce and InitProducerId: records come in.

Every partition has its own answer. The partitions of a request are stored at the same time, mostly
in one commit; the requests of a connection are stored in order. `acks` 1 and -1 mean the same:
durable. A client without an answer (`acks` 0) learns of an error by the end of its connection.
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
from streamhouse.storage_service.kafka.messages.produce_answer import (
    PRODUCE_VERSIONS,
    StoredPartition,
    produce_answer,
)
from streamhouse.storage_service.kafka.protocol_errors import (
    InvalidRecordsError,
    RecordsFault,
    is_bug,
)
from streamhouse.storage_service.kafka_door._api import Answer, Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._error_codes import is_repeated, produce_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from streamhouse.storage_service.kafka_door._topic_places import local_path
from streamhouse.storage_service.kafka_door.producing._decoding import (
    TRANSACTIONS,
    Decoded,
    RefusedRecordsError,
    decoded,
    decoded_inline,
    decoded_together,
    inline_bounds,
    inline_share,
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


@dataclass(slots=True)
class _Part:
    """One partition of a request, and the outcome."""

    topic: str
    partition: int
    records: bytes | None
    table: OpenTable | None = None
    batch: Decoded | None = None
    base_offset: int = NO_OFFSET
    error: StreamhouseError | None = None


async def _answer_produce(exchange: KafkaExchange, request: Any) -> Answer:
    """Store records, durable and visible before the answer."""
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
    with exchange.service.body_memory.body(exchange.share) as body_memory:
        # The rows are added below; the body itself is received.
        body_memory.end()
        await _decode_all(exchange, request, parts, body_memory)
        await exchange.my_turn()
        await _store_all(exchange, parts)
    if request.acks == 0:
        _end_if_refused(parts)
        return None
    return await _answer(exchange, request, parts)


async def _answer_init_producer_id(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with a new producer: a unique id in its first epoch.

    Brokers answer producers without transactions in the same way, whatever the previous id. The
    service keeps no state: a producer is known by its stored rows.
    """
    if request.transactional_id is not None:
        code = ErrorCode.transactional_id_authorization_failed
        exchange.note(code)
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"producer_id": secrets.randbits(_PRODUCER_ID_BITS), "producer_epoch": 0}


async def _refuse_repeated(parts: Sequence[_Part]) -> None:
    """Refuse a repeated partition: no producer repeats partitions, and the order is undefined.

    Therefore a request has at most a batch, and a write, for each bucket.
    """
    by_place: dict[tuple[str, int], list[_Part]] = {}
    async for part in in_slices(parts):
        mentions = by_place.setdefault((part.topic, part.partition), [])
        mentions.append(part)
        if len(mentions) > 1:
            error = InvalidRecordsError(
                f"partition {part.partition} is named twice; send one batch of it at a time"
            )
            mentions[0].error = part.error = error


async def _decode_all(
    exchange: KafkaExchange, request: Any, parts: Sequence[_Part], body_memory: HeldBody
) -> None:
    """Decode the records of all parts: large batches on several threads at a time.

    Small batches share a pass with all waiting batches of the table, including batches of other
    requests.
    """
    async for part in in_slices(parts):
        _find_table(exchange, request, part)
    readable = [part for part in parts if part.error is None]
    # A lone request, whose predecessor was alone too, waits for no other batch.
    has_others = len(parts) > 1 or exchange.service.open_requests > 1
    has_others = has_others or exchange.broker.decoding.was_shared
    shared_reads: list[tuple[_Part, int, asyncio.Future[Decoded | None]]] = []
    async with asyncio.TaskGroup() as at_once:
        async for part in in_slices(readable):
            assert part.table is not None
            bounds = inline_bounds(part.table.info, exchange.service.config)
            share = inline_share(part.records or b"", bounds)
            # The event loop reads what fits into one pass, and small batches that share passes.
            pass_share = 1 / bounds.pass_batches_min
            # With larger shares a request of many parts delays other requests for the table.
            share_max = max(1 / len(readable), pass_share / 2)
            inline_max = int(bounds.bytes_max * share_max)
            if share > share_max:
                at_once.create_task(_decode(exchange, part, body_memory, 0))
            elif has_others and share <= pass_share:
                shared_reads.append((part, inline_max, _begin_together(exchange, part, share)))
            else:
                # Work without a wait needs no task.
                await _decode(exchange, part, body_memory, inline_max)
    for part, inline_max, reading in shared_reads:
        part.batch = await reading
        await _decode(exchange, part, body_memory, inline_max)


def _find_table(exchange: KafkaExchange, request: Any, part: _Part) -> None:
    """Find the table of a part, or record why the part cannot be stored."""
    if part.error is not None:
        return
    try:
        if getattr(request, "transactional_id", None) is not None:
            raise UnsupportedError(TRANSACTIONS)
        path = topic_table(exchange, part.topic, Level.WRITE).path
        part.table = table = exchange.service.table(str(path))
        # Raises if the table has no bucket of this number.
        table.tablet(part.partition)
        if not part.records:
            raise InvalidRecordsError(f"no records came for partition {part.partition}")
    except StreamhouseError as error:
        # Thousands of errors with frames would slow down the garbage collector.
        part.error = error.with_traceback(None)


def _begin_together(
    exchange: KafkaExchange, part: _Part, share: float
) -> asyncio.Future[Decoded | None]:
    """Start reading a part's records in a shared pass; None means that the part is read alone."""
    table, config = part.table, exchange.service.config
    assert table is not None
    assert part.records is not None

    def read(batches: Sequence[tuple[bytes, int]]) -> Sequence[Decoded | None]:
        return decoded_together(batches, table.info, config, schemas_of(table).source())

    batch = part.records, part.partition
    return exchange.broker.decoding.begin(table, batch, share=share, work=read)


async def _store_all(exchange: KafkaExchange, parts: Sequence[_Part]) -> None:
    """Store all parts; the parts begin in order, and before the next request's parts."""
    storing = []
    async for part in in_slices(parts):
        if part.error is not None and not _keeps_place(part):
            _report(exchange, part)
            continue
        storing.append(asyncio.create_task(_store(exchange, part)))
        if len(storing) % _STORES_AT_ONCE == 0:
            # After this many starts other requests have their turns.
            await asyncio.sleep(0)
    exchange.pass_turn()
    await (storing[0] if len(storing) == 1 else asyncio.gather(*storing))


def _keeps_place(part: _Part) -> bool:
    """Return whether the producer of a refused part may send the same part again."""
    return part.error is not None and is_repeated(part.error) and bool(part.records)


async def _decode(
    exchange: KafkaExchange, part: _Part, body_memory: HeldBody, inline_max: int
) -> None:
    """Decode the records of a part that has no rows yet, or record the part's error."""
    assert part.table is not None
    try:
        if part.batch is None:
            part.batch = await _decoded(exchange, part.table, part, inline_max)
        if not body_memory.adds_at_once(part.batch.nbytes):
            raise body_memory.refusal()
    except StreamhouseError as error:
        part.error = error.with_traceback(None)
    except BaseException as error:  # outermost for a partition: the other parts are stored
        if not is_bug(error):
            raise
        _logger.exception("event=bug route=%s", exchange.route)
        part.error = InternalError("reading the records failed; the service's log says why")


async def _decoded(
    exchange: KafkaExchange, table: OpenTable, part: _Part, inline_max: int
) -> Decoded:
    """Decode records: inline if the work is small, else on a worker thread.

    The working memory is reserved first.
    """
    assert part.records is not None
    service, config = exchange.service, exchange.service.config
    arguments = (
        *(part.records, table.info, part.partition, config),
        schemas_of(table).source(),
    )
    if inline_max:
        batch = decoded_inline(*arguments, inline_max)
        if batch is not None:
            return batch
    for bytes_max in tried_bytes(part.records, config, inline_max=inline_max):
        needed_bytes = working_bytes(table.info, bytes_max)
        async with service.working_memory.room(exchange.share, needed_bytes):
            try:
                return await service.run_blocking(decoded, *arguments, bytes_max)
            except InvalidRecordsError as error:
                if error.fault is not RecordsFault.TOO_LARGE:
                    raise
                refusal = error.with_traceback(None)
    raise refusal


async def _store(exchange: KafkaExchange, part: _Part) -> None:
    """Store a decoded part; a temporarily refused part keeps its place in the producer's order."""
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
                # The answer reflects this process's view; another process may have taken over
                # meanwhile.
                exchange.tenure = service.tenure
        elif part.records and is_repeated(part.error):
            await keep_place(
                producers,
                refused,
                path=local_path(service.manager, part.topic) if table is None else table.path,
                records=part.records,
                partition=part.partition,
                is_damaged=produce_code_of(part.error) is ErrorCode.corrupt_message,
            )
    except StreamhouseError as error:
        part.error = error
    except Exception:  # outermost for a partition: the other parts have their answers
        _logger.exception("event=bug route=%s", exchange.route)
        part.error = InternalError("storing the records failed; the service's log says why")
    _report(exchange, part)


def _report(exchange: KafkaExchange, part: _Part) -> None:
    if part.error is not None:
        exchange.note(produce_code_of(part.error))
        exchange.path = f"{exchange.api.name} {part.topic[:TOPIC_CHARACTERS_MAX]}"
        exchange.report(part.error)
        if isinstance(part.error, RefusedRecordsError):
            exchange.service.count_broken(part.error.cause)


async def _answer(exchange: KafkaExchange, request: Any, parts: Sequence[_Part]) -> Answer:
    if all(part.error is None for part in parts):
        all_stored = iter([_stored(part) async for part in in_slices(parts)])
        stored = [
            (topic.name, list(itertools.islice(all_stored, len(topic.partition_data))))
            for topic in request.topic_data
        ]
        return [produce_answer(exchange.api_version, stored)]
    answered = iter([_part_answer(part) async for part in in_slices(parts)])
    return {
        "responses": [
            {
                "name": topic.name,
                "partition_responses": list(itertools.islice(answered, len(topic.partition_data))),
            }
            for topic in request.topic_data
        ]
    }


def _stored(part: _Part) -> StoredPartition:
    return StoredPartition(part.partition, part.base_offset, _log_start_offset(part))


def _part_answer(part: _Part) -> Mapping[str, Any]:
    values: dict[str, Any] = {
        "index": part.partition,
        "base_offset": part.base_offset,
        "log_start_offset": _log_start_offset(part),
    }
    error = part.error
    if error is None:
        return values
    record_errors = error.record_errors if isinstance(error, RefusedRecordsError) else ()
    return values | {
        "error_code": produce_code_of(error),
        "error_message": short(error.message),
        "record_errors": [
            {"batch_index": number, "batch_index_error_message": short(reason)}
            for number, reason in record_errors
        ],
    }


def _log_start_offset(part: _Part) -> int:
    table = part.table
    if table is None or not 0 <= part.partition < len(table.tablets):
        return NO_OFFSET
    return readable_offsets(table, part.partition).start


def _refuse(request: Any, code: ErrorCode, message: str) -> Mapping[str, Any]:
    """Return an answer with the request's error for every partition."""
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
        # Older librdkafka compresses nothing for a broker without version 0 (KAFKA-18659).
        first_listed=0,
        answer=_answer_produce,
        refuse=_refuse,
        is_write=True,
    ),
    Api(key=22, name="init_producer_id", versions=(0, 5), answer=_answer_init_producer_id),
)
