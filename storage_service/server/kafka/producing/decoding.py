"""The records of one partition in a Produce request, made rows and cut into what each bucket gets.

No I/O; on any thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.errors import StreamhouseError, UnsupportedError
from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault, is_bug
from streamhouse.storage_service.kafka.records.batch_header import (
    NO_PRODUCER,
    BatchHeader,
    open_batch,
    told_record_count,
)
from streamhouse.storage_service.kafka.records.batches import (
    OpenedBatch,
    open_produced,
    read_produced,
)
from streamhouse.storage_service.kafka.sequences import writer_of
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.rows import RecordRows, rows_of
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.model.changelog import DELETE, OPERATION_DELETE, UPDATE_AFTER
from streamhouse.storage_service.model.records.record_format import OnError
from streamhouse.storage_service.model.records.record_sequence import (
    EPOCH_MAX,
    RECORDS_MAX,
    RecordSequence,
)
from streamhouse.storage_service.model.rejected.division import Divided
from streamhouse.storage_service.model.rejected.row_splitter import BadRow
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.data.row_routing import (
    RowsRequest,
    routed_changes,
    routed_rows,
)
from streamhouse.storage_service.server.data.sifted_write import ROWS_MAX

__all__ = [
    "Decoded",
    "RefusedRecordsError",
    "decoded",
    "decoded_together",
    "inline_bytes",
    "place_of",
]

_logger = logging.getLogger(__name__)

TRANSACTIONS: Final = (
    "Kafka's transactions are not taken: produce without transactional.id; with enable.idempotence"
    " each record is stored once"
)
# As rows of JSON they take some milliseconds.
_INLINE_RECORDS_MAX: Final = 10_000
# Reading so many records takes as long for themselves as what is done once for all of them: larger
# batches gain nothing from others.
_PASS_BATCHES_MIN: Final = 8
# A client is told of the first ones; what is wrong with one is mostly wrong with all.
_TOLD_MAX: Final = 20


class RefusedRecordsError(InvalidRecordsError):
    """Records do not fit their table; `told` has some of them: (number in the batch, reason)."""

    told: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one partition's records are to their table."""

    partition: int
    record_count: int
    writer_id: int
    """0: the producer numbers nothing."""
    sequence: RecordSequence | None
    is_exact: bool
    """Whether the partition is a bucket that gets a row for each record, and so every batch."""
    batches: Sequence[RoutedBatch] = ()
    writes: Sequence[KeyWrite] = ()
    divided: Divided | None = None
    """Instead of both, where records that do not fit are kept apart."""

    @property
    def nbytes(self) -> int:
        """What its rows hold of memory."""
        held: int = sum(len(batch.payload) for batch in self.batches)
        held += sum(write.rows.nbytes for write in self.writes)
        if self.divided is not None:
            held += sum(batch.nbytes for batch in self.divided.good)
        return held


def decoded(
    data: bytes | memoryview,
    table: TableInfo,
    partition: int,
    config: ServiceConfig,
    schemas: SchemaSource | None = None,
    *,
    bytes_max: int | None = None,
) -> Decoded:
    """Read the records that a client sends to a partition of a table, whose schemas are `schemas`.

    They have at most `bytes_max` bytes when decompressed, by default `batch_bytes_max`. Raises
    InvalidRecordsError for bytes that are no batch of records, RefusedRecordsError for records that
    do not fit the table, and as `routed_rows`.
    """
    reading = _Reading(table, config, schemas)
    most = config.batch_bytes_max if bytes_max is None else bytes_max
    opened = reading.opened(data, partition, bytes_max=most)
    return reading.decoded(opened, reading.rows([opened]))


def decoded_together(
    batches: Sequence[tuple[bytes, int]],
    table: TableInfo,
    config: ServiceConfig,
    schemas: SchemaSource | None = None,
) -> list[Decoded | None]:
    """Read small batches of one table, each with its partition, at once: it costs less.

    Together they have at most `inline_bytes_max` bytes when decompressed. None stands for a batch
    that `decoded` is to read alone: it has no room here, or something may be wrong with it, which
    is said of one batch only.
    """
    reading = _Reading(table, config, schemas)
    done: list[Decoded | None] = [None] * len(batches)
    try:
        opened = _opened_within(batches, reading, config.inline_bytes_max)
        if not opened:
            return done
        found = reading.rows(list(opened.values()))
        counts = [one.batch.header.record_count for one in opened.values()]
        for (at, one), part in zip(opened.items(), found.parts(counts), strict=True):
            if not part.bad:
                done[at] = reading.decoded(one, part)
    except StreamhouseError:
        pass
    except BaseException as error:
        if not is_bug(error):
            raise
        # It is told to who sent the batch that meets it, and logged, when that is read alone.
        _logger.warning("event=records_read_alone batches=%d why=%r", len(batches), error)
    return done


def _opened_within(
    batches: Sequence[tuple[bytes, int]], reading: _Reading, bytes_left: int
) -> dict[int, _Opened]:
    """Return the batches that can be opened, by their places, within so many bytes of records."""
    opened: dict[int, _Opened] = {}
    batch_bytes_max = bytes_left // _PASS_BATCHES_MIN
    for at, (data, partition) in enumerate(batches):
        most = min(bytes_left, batch_bytes_max)
        # What is refused may have been decompressed up to there.
        bytes_left -= most
        with contextlib.suppress(StreamhouseError):
            opened[at] = reading.opened(data, partition, bytes_max=most)
            bytes_left += most - len(opened[at].batch.records)
    return opened


class _Opened(NamedTuple):
    """A batch whose records are not looked at yet, and its place among its producer's."""

    partition: int
    batch: OpenedBatch
    sequence: RecordSequence | None


class _Reading:
    """How batches are read for one table."""

    def __init__(
        self, table: TableInfo, config: ServiceConfig, schemas: SchemaSource | None
    ) -> None:
        self._table = table
        self._config = config
        self._schemas = schemas
        self._is_rejecting = table.descriptor.record_format().on_error is OnError.REJECT
        has_own_buckets = bool(table.descriptor.effective_bucket_key) and table.bucket_count > 1
        self._is_exact = not (table.is_primary_key_table or has_own_buckets or self._is_rejecting)

    def opened(self, data: bytes | memoryview, partition: int, *, bytes_max: int) -> _Opened:
        """Check what a batch says before its records are read."""
        batch = open_produced(
            memoryview(data),
            bytes_max=bytes_max,
            records_max=ROWS_MAX if self._is_rejecting else RECORDS_MAX,
        )
        return _Opened(partition, batch, _sequence(batch.header))

    def rows(self, opened: Sequence[_Opened]) -> RecordRows:
        """Read the records of batches, all behind each other."""
        columns = read_produced([one.batch for one in opened])
        bytes_max = self._config.body_bytes_max
        return rows_of(columns, self._table, bytes_max=bytes_max, schemas=self._schemas)

    def decoded(self, opened: _Opened, found: RecordRows) -> Decoded:
        """Return what the rows of a batch are to the table, each with its bucket."""
        table, sequence, partition = self._table, opened.sequence, opened.partition
        header = opened.batch.header
        writer_id = 0 if sequence is None else writer_of(header.producer_id, partition)
        request = RowsRequest(table=table, verb="produce", config=self._config, writer_id=writer_id)
        packed = 0 if sequence is None else sequence.packed()
        batches: Sequence[RoutedBatch] = ()
        writes: Sequence[KeyWrite] = ()
        divided = None
        if found.bad:
            if not self._is_rejecting:
                raise _refusal(found.bad, table)
            good = [_as_changes(found)] if found.rows.num_rows else []
            divided = Divided(good, [(0, found.bad)], table.schema_id)
        elif table.is_primary_key_table:
            writes = routed_changes(found.rows, found.operations, request, sequence=packed)
        elif found.rows.num_rows:
            batches = routed_rows(found.rows, request, bucket=partition, sequence=packed)
        return Decoded(
            partition=partition,
            record_count=header.record_count,
            writer_id=writer_id,
            sequence=sequence,
            is_exact=self._is_exact,
            batches=batches,
            writes=writes,
            divided=divided,
        )


def inline_bytes(batches: Sequence[bytes | None], *, bytes_max: int) -> int:
    """Return how many bytes each of a request's batches may have, decompressed, to be soon decoded.

    0 where all together are not: each of many is soon decoded alone. Their headers are believed,
    which are checked by who decodes them.
    """
    if sum(len(batch or b"") for batch in batches) > bytes_max:
        return 0
    if sum(told_record_count(batch or b"") for batch in batches) > _INLINE_RECORDS_MAX:
        return 0
    return bytes_max // max(1, len(batches))


def share_of_pass(data: bytes, *, bytes_max: int) -> float:
    """Return how much of one call of `decoded_together` a batch is; 0 if it is to be read alone.

    All calls together take as long as one `inline_bytes` lets take. The header is believed.
    """
    share = max(len(data) / bytes_max, told_record_count(data) / _INLINE_RECORDS_MAX)
    return share if share <= 1 / _PASS_BATCHES_MIN else 0


def place_of(data: bytes, partition: int) -> tuple[int, RecordSequence] | None:
    """Return the writer and sequence of a batch whose records nobody has read; None: it has none.

    Raises InvalidRecordsError.
    """
    header = open_batch(memoryview(data))[0]
    sequence = _sequence(header)
    return None if sequence is None else (writer_of(header.producer_id, partition), sequence)


def _sequence(batch: BatchHeader) -> RecordSequence | None:
    """Return where a batch is among its producer's; None: the producer does not number them.

    Raises for a batch that no producer may send.
    """
    if batch.is_control or batch.is_transactional:
        raise UnsupportedError(TRANSACTIONS)
    if batch.record_count < 1 or not batch.is_dense:
        raise InvalidRecordsError(
            f"{batch.record_count} records up to number {batch.last_offset_delta} are no batch of a"
            " producer: it has all numbers from 0 on"
        )
    if batch.producer_id == NO_PRODUCER:
        return None
    if batch.producer_id < 0 or batch.base_sequence < 0:
        raise InvalidRecordsError(
            f"producer {batch.producer_id} with sequence {batch.base_sequence} is none: both are 0"
            " or more"
        )
    if not 0 <= batch.producer_epoch <= EPOCH_MAX:
        raise InvalidRecordsError(f"{batch.producer_epoch} is no epoch of a producer")
    if batch.record_count > RECORDS_MAX:
        raise InvalidRecordsError(
            f"{batch.record_count} records in a batch of an idempotent producer; at most"
            f" {RECORDS_MAX}, send smaller batches",
            fault=RecordsFault.TOO_LARGE,
        )
    return RecordSequence(batch.producer_epoch, batch.base_sequence, batch.record_count)


def _refusal(bad: Sequence[BadRow], table: TableInfo) -> RefusedRecordsError:
    first = bad[0]
    error = RefusedRecordsError(
        f"produce to '{table.path}': {len(bad)} records do not fit, the first is record"
        f" {first.position} of its batch: {_why(first)}; nothing of the batch is stored"
    )
    error.told = [(row.position, _why(row)) for row in bad[:_TOLD_MAX]]
    return error


def _why(row: BadRow) -> str:
    return row.reason if row.column is None else f"column '{row.column}': {row.reason}"


def _as_changes(found: RecordRows) -> pa.RecordBatch:
    """Return rows that say themselves what they do, if they are changes."""
    if found.operations is None:
        return found.rows
    codes = np.where(found.operations == OPERATION_DELETE, DELETE, UPDATE_AFTER)
    return found.rows.append_column(CHANGE_TYPE_COLUMN, pa.array(codes.astype(np.int8)))
