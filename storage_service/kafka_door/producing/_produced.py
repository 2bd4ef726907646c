"""What a Produce request has for one partition, stored: in the producer's order, once.

Where a partition is a bucket and each record a row, the log of the bucket has the producer's
sequences and knows what is next. Else `kafka/sequences.py` knows it, and a batch waits until the
one before it is stored (decision 25).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from streamhouse.core.errors import FencedError, StreamhouseError
from streamhouse.core.model.records.record_sequence import Continuity
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.kafka.sequences import Repeated
from streamhouse.storage_service.kafka_door._error_codes import is_repeated
from streamhouse.storage_service.kafka_door.broker._producers import (
    RefusedPlaces,
    TableProducers,
)
from streamhouse.storage_service.kafka_door.producing._decoding import Decoded, place_of
from streamhouse.storage_service.server.data.sifted_write import SiftedWrite, write_divided
from streamhouse.storage_service.server.http.http_exchange import Body
from streamhouse.storage_service.server.service import Service

__all__ = ["NO_OFFSET", "Stored", "keep_place", "store"]

NO_OFFSET: Final = -1
"""Of records that are in several buckets, or are changes by key, there is no first offset."""
_TRANSACTION_ID_BYTES: Final = 16


class Stored(NamedTuple):
    """What became of a batch: its first offset, or `NO_OFFSET`, and whether anything was written.

    Else it was stored before, or there was nothing to change.
    """

    base_offset: int
    is_write: bool


async def store(
    service: Service,
    table: OpenTable,
    batch: Decoded,
    producers: TableProducers,
    refused: RefusedPlaces,
) -> Stored:
    """Store a batch, or find that it is stored. `refused` is of the connection that it came by.

    It is durable and visible on return. Batches of a producer that are given in order are stored in
    that order. Raises OutOfOrderSequenceError for one that does not follow, FencedError for an
    older epoch, and as any write.
    """
    order = producers.order
    # While bad records were kept apart a bucket did not get every batch.
    is_exact = batch.is_exact and batch.writer_id not in order
    if batch.sequence is None or is_exact:
        return await _write(service, table, batch, Continuity.EXACT)
    async with producers.turn(batch.writer_id):
        if batch.writer_id not in order:
            refused.check(table.path, batch.writer_id, batch.sequence)
        # First of all: what is refused from here on keeps its place.
        admitted = order.admit(batch.writer_id, batch.sequence)
        if isinstance(admitted, Repeated):
            refused.stored(table.path, batch.writer_id, batch.sequence)
            return Stored(admitted.answer, is_write=False)
        try:
            stored = await _write(service, table, batch, admitted)
        except FencedError as error:
            order.refused(batch.writer_id, error)
            raise
        except StreamhouseError as error:
            if is_repeated(error):
                refused.note(table.path, batch.writer_id, batch.sequence)
            raise
        order.stored(batch.writer_id, batch.sequence, stored.base_offset)
        refused.stored(table.path, batch.writer_id, batch.sequence)
        return stored


async def keep_place(
    producers: TableProducers | None,
    refused: RefusedPlaces,
    *,
    path: TablePath,
    records: bytes,
    partition: int,
    is_damaged: bool,
) -> None:
    """Keep the place of a batch that is refused for now, so that no later one is taken first.

    `producers` are of its table, if that is here. Who damaged records are of is believed for as
    long as `refused` remembers it, and no longer.
    """
    with contextlib.suppress(StreamhouseError):
        place = place_of(records, partition, is_damaged=is_damaged)
        if place is not None:
            refused.note(path, *place)
            if producers is not None and not is_damaged:
                async with producers.turn(place[0]):
                    producers.order.admit(*place)


async def _write(
    service: Service, table: OpenTable, batch: Decoded, continuity: Continuity
) -> Stored:
    service.manager.disk_budget.check()
    service.check_write()
    ranges: Mapping[int, tuple[int, int]]
    if batch.divided is not None:
        asked = _asked(table, batch)
        ranges = (await write_divided(service, table, asked, batch.divided)).ranges
    elif isinstance(table, KeyTable):
        writes = [write._replace(continuity=continuity) for write in batch.writes]
        appended = await service.manager.write_keys(
            table, writes, columns=None, writer_id=batch.writer_id
        )
        ranges = appended.ranges
    else:
        assert isinstance(table, LogTable)
        batches = [routed._replace(continuity=continuity) for routed in batch.batches]
        ranges = (await service.manager.append(table, batches)).ranges
    service.check_written()
    service.metrics.appended_rows.inc(batch.record_count)
    is_write = any(start < end for start, end in ranges.values())
    start, end = ranges.get(batch.partition, (0, 0))
    if isinstance(table, KeyTable) and len(table.tablets) == 1:
        # A record has none, one or two changes. The last one is told where the log ends with it, so
        # that who reads on behind it misses nothing, and what is told goes on as the log does.
        end = end or table.tablets[0].high_watermark
        return Stored(max(NO_OFFSET, end - batch.record_count), is_write)
    is_whole = end - start == batch.record_count and isinstance(table, LogTable)
    return Stored(start if is_whole else NO_OFFSET, is_write)


def _asked(table: OpenTable, batch: Decoded) -> SiftedWrite:
    """Return what is asked of a batch with records that are kept apart.

    The transaction is known by the producer's sequence: it happens once, also across a restart. An
    outcome may be remembered for as long as sequences take to go round, so the time is of it, too.
    """
    transaction_id = None
    if batch.sequence is not None:
        place = batch.writer_id, batch.sequence.packed(), *batch.timestamps_ms
        named = " ".join(map(str, (table.info.table_id, *place)))
        digest = hashlib.blake2b(named.encode(), digest_size=_TRANSACTION_ID_BYTES)
        transaction_id = digest.hexdigest()
    is_keyed = isinstance(table, KeyTable)
    has_key = bool(table.info.descriptor.effective_bucket_key)
    return SiftedWrite(
        operation=TransactionOperation.UPSERT if is_keyed else TransactionOperation.APPEND,
        form=Body.ROWS,
        is_rejecting=True,
        transaction_id=transaction_id,
        app_id=None,
        version=None,
        source=f"kafka partition {batch.partition}",
        first_row=0,
        bucket=None if has_key else batch.partition,
    )
