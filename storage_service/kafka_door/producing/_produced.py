"""Stores one partition of a Produce request: in the producer's order, and once.

If the partition is a bucket and each record a row, the bucket's log has the producer's sequences
and knows the next one. Otherwise `kafka/sequences.py` knows the next number, and a batch waits
until the predecessor is stored (decision 25).
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
from streamhouse.storage_service.server.data.sifted_write import SiftedWrite, write_checked
from streamhouse.storage_service.server.http.http_exchange import Body
from streamhouse.storage_service.server.service import Service

__all__ = ["NO_OFFSET", "Stored", "keep_place", "store"]

NO_OFFSET: Final = -1
"""Records in several buckets, and changes by key, have no first offset."""
_TRANSACTION_ID_BYTES: Final = 16


class Stored(NamedTuple):
    """The first offset of a batch, or `NO_OFFSET`, and whether anything was written.

    Nothing is written if the batch was stored before, or changed nothing.
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
    """Store a batch once, durable and visible on return. `refused` belongs to the connection.

    Batches of a producer are stored in the order of the calls. Raises OutOfOrderSequenceError for a
    gap in the sequence, FencedError for an older epoch, and as any write.
    """
    order = producers.order
    # Unless the bucket has missed batches, because misfit records were kept apart.
    is_exact = batch.is_exact and batch.writer_id not in order
    if batch.sequence is None or is_exact:
        return await _write(service, table, batch, Continuity.EXACT)
    async with producers.turn(batch.writer_id):
        if batch.writer_id not in order:
            refused.check(table.path, batch.writer_id, batch.sequence)
        # First of all: a batch that is refused from here on keeps its place.
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
    """Keep the place of a temporarily refused batch before all later batches.

    `producers` belong to the table, if the table is in this process. The producer of a damaged
    batch is not verified, so only `refused` remembers the place of a damaged batch.
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
    if batch.rejecting is not None:
        sifted = _sifted_write(table, batch)
        ranges = (await write_checked(service, table, sifted, batch.rejecting)).ranges
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
        # A record has zero, one or two changes. The last record is answered with the end of the
        # log: a reader from behind that offset misses nothing, and answered offsets increase with
        # the log.
        end = end or table.tablets[0].high_watermark
        return Stored(max(NO_OFFSET, end - batch.record_count), is_write)
    is_whole = end - start == batch.record_count and isinstance(table, LogTable)
    return Stored(start if is_whole else NO_OFFSET, is_write)


def _sifted_write(table: OpenTable, batch: Decoded) -> SiftedWrite:
    """Return the write of a batch with separate misfit records.

    The producer's sequence identifies the transaction, which therefore happens once, also across a
    restart. Sequences may wrap around while an outcome is remembered, so the identity includes the
    time.
    """
    transaction_id = None
    if batch.sequence is not None:
        place = batch.writer_id, batch.sequence.packed(), *batch.timestamps_ms
        identity = " ".join(map(str, (table.info.table_id, *place)))
        digest = hashlib.blake2b(identity.encode(), digest_size=_TRANSACTION_ID_BYTES)
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
        schema_id=batch.schema_id,
        bucket=None if has_key else batch.partition,
    )
