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

from streamhouse.core.errors import StreamhouseError, UnsupportedError
from streamhouse.core.model.changelog import DELETE, OPERATION_DELETE, UPDATE_AFTER
from streamhouse.core.model.records.record_format import (
    KeyFormat,
    OnError,
    ValueFormat,
)
from streamhouse.core.model.records.record_sequence import (
    EPOCH_MAX,
    RECORDS_MAX,
    RecordSequence,
)
from streamhouse.core.model.rejected.division import Divided
from streamhouse.core.model.rejected.row_splitter import BadRow
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault, is_bug
from streamhouse.storage_service.kafka.records.batch_header import (
    NO_PRODUCER,
    BatchHeader,
    open_batch,
    told_is_compressed,
    told_record_count,
)
from streamhouse.storage_service.kafka.records.batches import (
    OpenedBatch,
    open_produced,
    read_produced,
)
from streamhouse.storage_service.kafka.records.record_reading import HEADERS_MAX, HeadersMax
from streamhouse.storage_service.kafka.sequences import writer_of
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.rows import RecordRows, rows_of
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.server.data.row_routing import (
    RowsRequest,
    routed_changes,
    routed_rows,
)
from streamhouse.storage_service.server.data.sifted_write import ROWS_MAX

__all__ = [
    "Decoded",
    "InlineBounds",
    "RefusedRecordsError",
    "decoded",
    "decoded_inline",
    "decoded_together",
    "inline_bounds",
    "inline_share",
    "place_of",
    "share_of_pass",
    "tried_bytes",
    "working_bytes",
]

_logger = logging.getLogger(__name__)

TRANSACTIONS: Final = (
    "Kafka's transactions are not taken: produce without transactional.id; with enable.idempotence"
    " each record is stored once"
)
# Raw values are not looked at.
_RAW_RECORDS_MAX: Final = 10_000
# What has columns may be read value by value, if it wants to: so much takes some hundredths of a
# second then.
_COLUMNS_BYTES_MAX: Final = 64 << 10
_COLUMNS_RECORDS_MAX: Final = 800
_INLINE_HEADERS: Final = HeadersMax(100, 10_000)
# Reading so many records takes as long for themselves as what is done once for all of them: larger
# batches gain nothing from others.
_PASS_RAW_BATCHES_MIN: Final = 8
_PASS_COLUMNS_BATCHES_MIN: Final = 2
# What reading takes, for each byte of records: the records as they came, decompressed, put together
# and as columns, and those once more as they are stored; texts are also read as Python's objects.
_RAW_WORKING: Final = 4
_COLUMNS_WORKING: Final = 8
# What few compressed records have more when they are decompressed. Else they are read once more.
_USUAL_RATIO: Final = 8
_USUAL_BYTES_MIN: Final = 64 << 10
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
    timestamps_ms: tuple[int, int] = (0, 0)
    """Of the first record, and the latest: sequences go round, and time does not."""
    batches: Sequence[RoutedBatch] = ()
    writes: Sequence[KeyWrite] = ()
    divided: Divided | None = None
    """Instead of both, where records that do not fit are kept apart."""
    bad_nbytes: int = 0
    """What these hold of memory."""

    @property
    def nbytes(self) -> int:
        """What its rows hold of memory."""
        held: int = self.bad_nbytes + sum(len(batch.payload) for batch in self.batches)
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
    bytes_max: int | None = None,
    headers_max: HeadersMax = HEADERS_MAX,
) -> Decoded:
    """Read the records that a client sends to a partition of a table, whose schemas are `schemas`.

    They have at most `bytes_max` bytes when decompressed, by default `batch_bytes_max`, and
    `headers_max`. Raises InvalidRecordsError for bytes that are no batch of records,
    RefusedRecordsError for records that do not fit the table, and as `routed_rows`.
    """
    reading = _Reading(table, config, schemas)
    most = config.batch_bytes_max if bytes_max is None else bytes_max
    opened = reading.opened(data, partition, bytes_max=most)
    return reading.decoded(opened, reading.rows([opened], headers_max))


def decoded_inline(
    data: bytes | memoryview,
    table: TableInfo,
    partition: int,
    config: ServiceConfig,
    schemas: SchemaSource | None,
    bytes_max: int,
) -> Decoded | None:
    """Read records as `decoded` does, if that is soon done; None: it would not be.

    A few bytes may be very many when decompressed, which is known only once they are: that is tried
    up to `bytes_max`.
    """
    try:
        return decoded(data, table, partition, config, schemas, bytes_max, _INLINE_HEADERS)
    except InvalidRecordsError as error:
        if error.fault is not RecordsFault.TOO_LARGE:
            raise
        return None


def decoded_together(
    batches: Sequence[tuple[bytes, int]],
    table: TableInfo,
    config: ServiceConfig,
    schemas: SchemaSource | None = None,
) -> list[Decoded | None]:
    """Read small batches of one table, each with its partition, at once: it costs less.

    Together they have at most the bytes of `inline_bounds` when decompressed. None stands for a
    batch that is to be read alone: it has no room here, or something may be wrong with it, which is
    said of one batch only.
    """
    reading = _Reading(table, config, schemas)
    done: list[Decoded | None] = [None] * len(batches)
    try:
        opened = _opened_within(batches, reading, inline_bounds(table, config))
        if not opened:
            return done
        found = reading.rows(list(opened.values()), _INLINE_HEADERS)
        counts = [one.batch.header.record_count for one in opened.values()]
        for (at, one), part in zip(opened.items(), found.parts(counts), strict=True):
            if not part.bad:
                done[at] = reading.decoded(one, part)
    except StreamhouseError:
        pass
    except BaseException as error:  # a bug of one batch is nothing to the others
        if not is_bug(error):
            raise
        # It is told to who sent the batch that meets it, and logged, when that is read alone.
        _logger.warning("event=records_read_alone batches=%d why=%r", len(batches), error)
    return done


def _opened_within(
    batches: Sequence[tuple[bytes, int]], reading: _Reading, bounds: InlineBounds
) -> dict[int, _Opened]:
    """Return the batches that can be opened, by their places, within so many bytes of records."""
    opened: dict[int, _Opened] = {}
    bytes_left = bounds.bytes_max
    batch_bytes_max = bytes_left // bounds.pass_batches_min
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

    def rows(self, opened: Sequence[_Opened], headers_max: HeadersMax) -> RecordRows:
        """Read the records of batches, all behind each other."""
        columns = read_produced([one.batch for one in opened], headers_max=headers_max)
        bytes_max = self._config.body_bytes_max
        return rows_of(columns, self._table, bytes_max=bytes_max, schemas=self._schemas)

    def decoded(self, opened: _Opened, found: RecordRows) -> Decoded:
        """Return what the rows of a batch are to the table, each with its bucket."""
        table, sequence, partition = self._table, opened.sequence, opened.partition
        header = opened.batch.header
        writer_id = 0 if sequence is None else writer_of(header.producer_id, partition)
        request = RowsRequest(
            table=table,
            verb="produce",
            config=self._config,
            schema_id=table.schema_id,
            writer_id=writer_id,
        )
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
            timestamps_ms=(header.base_timestamp_ms, header.max_timestamp_ms),
            batches=batches,
            writes=writes,
            divided=divided,
            bad_nbytes=found.bad_nbytes,
        )


class InlineBounds(NamedTuple):
    """What of a table's records is read on the event loop, at most, by all that is read at once."""

    bytes_max: int
    """When they are decompressed."""
    records_max: int
    pass_batches_min: int
    """A batch gains from others that are read with it if it is so small a part."""


def inline_bounds(table: TableInfo, config: ServiceConfig) -> InlineBounds:
    """Return how many of a table's records are soon read: it depends on what they are."""
    most = config.inline_bytes_max
    if _is_raw(table):
        return InlineBounds(most, _RAW_RECORDS_MAX, _PASS_RAW_BATCHES_MIN)
    bytes_max = min(most, _COLUMNS_BYTES_MAX)
    return InlineBounds(bytes_max, _COLUMNS_RECORDS_MAX, _PASS_COLUMNS_BATCHES_MIN)


def inline_share(data: bytes, bounds: InlineBounds) -> float:
    """Return how much a batch is of what is soon read. The header is believed.

    Who reads it checks the header, and the bytes once they are decompressed.
    """
    return max(len(data) / bounds.bytes_max, told_record_count(data) / bounds.records_max)


def share_of_pass(data: bytes, bounds: InlineBounds) -> float:
    """Return how much of one call of `decoded_together` a batch is; 0 if it is to be read alone."""
    share = inline_share(data, bounds)
    return share if share <= 1 / bounds.pass_batches_min else 0


def tried_bytes(data: bytes, config: ServiceConfig, *, inline_max: int) -> Sequence[int]:
    """Return how many bytes records may have, decompressed, in each try to read them on a thread.

    The last is what they may have at all; `inline_max` was tried already.
    """
    most = config.batch_bytes_max
    if not told_is_compressed(data):
        return [min(len(data), most)]
    usual = max(_USUAL_BYTES_MIN, _USUAL_RATIO * len(data))
    return [usual, most] if inline_max < usual < most else [most]


def working_bytes(table: TableInfo, bytes_max: int) -> int:
    """Return what reading records takes of memory that have up to so many bytes."""
    return bytes_max * (_RAW_WORKING if _is_raw(table) else _COLUMNS_WORKING)


def _is_raw(table: TableInfo) -> bool:
    form = table.descriptor.record_format()
    is_raw_key = not form.key_columns or form.key is KeyFormat.RAW
    return form.value is ValueFormat.RAW and is_raw_key


def place_of(
    data: bytes, partition: int, *, is_damaged: bool = False
) -> tuple[int, RecordSequence] | None:
    """Return the writer and sequence of a batch whose records nobody has read; None: it has none.

    Raises InvalidRecordsError; of a batch that is damaged only for a header that cannot be.
    """
    header = open_batch(memoryview(data), is_damaged=is_damaged)[0]
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
