"""The records of one partition in a Produce request, turned into rows and divided by bucket.

No I/O; on any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from streamhouse.core.errors import CheckFailedError, StreamhouseError, UnsupportedError
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
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows, Misfit
from streamhouse.reading.where.checks import check_failed, judged
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kafka.protocol_errors import (
    InvalidRecordsError,
    RecordsFault,
    is_bug,
)
from streamhouse.storage_service.kafka.records.batch_header import (
    NO_PRODUCER,
    BatchHeader,
    claimed_record_count,
    claims_compression,
    open_batch,
)
from streamhouse.storage_service.kafka.records.batches import (
    OpenedBatch,
    open_produced,
    read_produced,
)
from streamhouse.storage_service.kafka.records.record_reading import HEADERS_MAX, HeadersMax
from streamhouse.storage_service.kafka.sequences import writer_of
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.rows import rows_of
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
    "tried_bytes",
    "working_bytes",
]

_logger = logging.getLogger(__name__)

TRANSACTIONS: Final = (
    "Kafka's transactions are not taken: produce without transactional.id; with enable.idempotence"
    " each record is stored once"
)
# The values of raw records are not parsed.
_RAW_RECORDS_MAX: Final = 10_000
# Columns may need value-by-value reading, which takes some hundredths of a second for this many
# bytes and records.
_COLUMNS_BYTES_MAX: Final = 64 << 10
_COLUMNS_RECORDS_MAX: Final = 800
_INLINE_HEADERS: Final = HeadersMax(100, 10_000)
# With this many records the per-record work equals the work that is done once for a pass: larger
# batches gain nothing from being read together.
_PASS_RAW_BATCHES_MIN: Final = 8
_PASS_COLUMNS_BATCHES_MIN: Final = 2
# Working memory for each byte of records: the received, the decompressed and the joined records,
# the columns, and the stored rows; texts are also Python objects.
_RAW_WORKING: Final = 4
_COLUMNS_WORKING: Final = 8
# The usual expansion of compressed records, at least for small batches. Records that expand more
# are read once more.
_USUAL_RATIO: Final = 8
_USUAL_BYTES_MIN: Final = 64 << 10
# A client gets the first errors only; mostly all records have the same error.
_RECORD_ERRORS_MAX: Final = 20


class RefusedRecordsError(InvalidRecordsError):
    """Records do not fit their table; `record_errors` has some: (number in the batch, reason)."""

    record_errors: Sequence[tuple[int, str]] = ()
    cause: CheckFailedError | None = None
    """Set if the first of the records breaks a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The rows of one partition's records, ready to be written to the table."""

    partition: int
    record_count: int
    writer_id: int
    """0: the producer sends no sequence numbers."""
    sequence: RecordSequence | None
    is_exact: bool
    """Whether the partition is a bucket that gets one row for each record of every batch."""
    timestamps_ms: tuple[int, int] = (0, 0)
    """The first and the latest timestamp: sequences wrap around, time does not."""
    batches: Sequence[RoutedBatch] = ()
    writes: Sequence[KeyWrite] = ()
    rejecting: CheckedRows | None = None
    """Replaces `batches` and `writes` if misfit records are kept apart."""
    schema_id: int = 0
    """The schema version of the rows."""

    @property
    def nbytes(self) -> int:
        """The memory of the rows."""
        byte_count: int = sum(len(batch.payload) for batch in self.batches)
        byte_count += sum(write.rows.nbytes for write in self.writes)
        if self.rejecting is not None:
            byte_count += self.rejecting.rows.nbytes + self.rejecting.original_nbytes
        return byte_count


def decoded(
    data: bytes | memoryview,
    table: TableInfo,
    partition: int,
    config: ServiceConfig,
    schemas: SchemaSource | None = None,
    bytes_max: int | None = None,
    headers_max: HeadersMax = HEADERS_MAX,
) -> Decoded:
    """Return the records of a client's batch as rows of a table.

    `schemas` are the table's registered schemas. The decompressed records have at most `bytes_max`
    bytes, by default `batch_bytes_max`, and at most `headers_max`. Raises InvalidRecordsError for
    bytes without a valid batch, RefusedRecordsError for records unfit for the table, and as
    `routed_rows`.
    """
    reading = _Reading(table, config, schemas)
    bytes_max = config.batch_bytes_max if bytes_max is None else bytes_max
    opened = reading.opened(data, partition, bytes_max=bytes_max)
    return reading.decoded(opened, reading.rows([opened], headers_max))


def decoded_inline(
    data: bytes | memoryview,
    table: TableInfo,
    partition: int,
    config: ServiceConfig,
    schemas: SchemaSource | None,
    bytes_max: int,
) -> Decoded | None:
    """Read records as `decoded` does if the work is small; return None otherwise.

    The decompressed size is known only after decompression, so the records are decompressed up to
    `bytes_max`.
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
    """Read small batches of a table, each with a partition, in a cheaper common pass.

    All decompressed batches have at most the bytes of `inline_bounds`. None stands for a batch that
    has to be read alone, because the bounds left no room or because the batch may have an error.
    """
    reading = _Reading(table, config, schemas)
    results: list[Decoded | None] = [None] * len(batches)
    try:
        opened = _opened_within(batches, reading, inline_bounds(table, config))
        if not opened:
            return results
        record_rows = reading.rows(list(opened.values()), _INLINE_HEADERS)
        counts = [batch.batch.header.record_count for batch in opened.values()]
        for (number, batch), part in zip(opened.items(), record_rows.parts(counts), strict=True):
            if not part.misfits:
                results[number] = reading.decoded(batch, part)
    except StreamhouseError:
        pass
    except BaseException as error:  # a bug in one batch does not affect the others
        if not is_bug(error):
            raise
        # Reading the batch alone reports and logs the error for its sender.
        _logger.warning("event=records_read_alone batches=%d why=%r", len(batches), error)
    return results


def _opened_within(
    batches: Sequence[tuple[bytes, int]], reading: _Reading, bounds: InlineBounds
) -> dict[int, _Opened]:
    """Return the valid batches by number, within the bound of bytes."""
    opened: dict[int, _Opened] = {}
    remaining_bytes = bounds.bytes_max
    batch_bytes_max = remaining_bytes // bounds.pass_batches_min
    for number, (data, partition) in enumerate(batches):
        bytes_max = min(remaining_bytes, batch_bytes_max)
        # A refused batch may have been decompressed up to the limit.
        remaining_bytes -= bytes_max
        with contextlib.suppress(StreamhouseError):
            opened[number] = reading.opened(data, partition, bytes_max=bytes_max)
            remaining_bytes += bytes_max - len(opened[number].batch.records)
    return opened


class _Opened(NamedTuple):
    """A decompressed batch whose records are not read yet, and the batch's producer sequence."""

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
        """Check a batch's header and decompress the records."""
        batch = open_produced(
            memoryview(data),
            bytes_max=bytes_max,
            records_max=ROWS_MAX if self._is_rejecting else RECORDS_MAX,
        )
        return _Opened(partition, batch, _sequence(batch.header))

    def rows(self, opened: Sequence[_Opened], headers_max: HeadersMax) -> CheckedRows:
        """Read the records of consecutive batches."""
        columns = read_produced([batch.batch for batch in opened], headers_max=headers_max)
        bytes_max = self._config.body_bytes_max
        return rows_of(columns, self._table, bytes_max=bytes_max, schemas=self._schemas)

    def decoded(self, opened: _Opened, record_rows: CheckedRows) -> Decoded:
        """Assign the rows of a batch to buckets."""
        table, sequence, partition = self._table, opened.sequence, opened.partition
        record_rows = judged(table, record_rows, schema_id=table.schema_id)
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
        rejecting = None
        if record_rows.misfits:
            if not self._is_rejecting:
                raise _refusal(record_rows, table)
            rejecting = _with_change_types(record_rows)
        elif table.is_primary_key_table:
            writes = routed_changes(
                record_rows.rows, record_rows.operations, request, sequence=packed
            )
        elif record_rows.rows.num_rows:
            batches = routed_rows(record_rows.rows, request, bucket=partition, sequence=packed)
        return Decoded(
            partition=partition,
            record_count=header.record_count,
            writer_id=writer_id,
            sequence=sequence,
            is_exact=self._is_exact,
            timestamps_ms=(header.base_timestamp_ms, header.max_timestamp_ms),
            batches=batches,
            writes=writes,
            rejecting=rejecting,
            schema_id=table.schema_id,
        )


class InlineBounds(NamedTuple):
    """How much of a table's records the event loop reads at most in one pass."""

    bytes_max: int
    """The decompressed size."""
    records_max: int
    pass_batches_min: int
    """A batch gains from a shared pass if at least this many such batches fit into the bounds."""


def inline_bounds(table: TableInfo, config: ServiceConfig) -> InlineBounds:
    """Return how many of a table's records are read quickly, by the format of the records."""
    inline_bytes_max = config.inline_bytes_max
    if _is_raw(table):
        return InlineBounds(inline_bytes_max, _RAW_RECORDS_MAX, _PASS_RAW_BATCHES_MIN)
    bytes_max = min(inline_bytes_max, _COLUMNS_BYTES_MAX)
    return InlineBounds(bytes_max, _COLUMNS_RECORDS_MAX, _PASS_COLUMNS_BATCHES_MIN)


def inline_share(data: bytes, bounds: InlineBounds) -> float:
    """Return a batch's share of `bounds`, as claimed by the unchecked header.

    The reader checks the header, and the size after decompression.
    """
    return max(len(data) / bounds.bytes_max, claimed_record_count(data) / bounds.records_max)


def tried_bytes(data: bytes, config: ServiceConfig, *, inline_max: int) -> Sequence[int]:
    """Return the limit of decompressed bytes for each attempt to read records on a thread.

    The last limit is the maximal size of a batch; `inline_max` has been tried already.
    """
    bytes_max = config.batch_bytes_max
    if not claims_compression(data):
        return [min(len(data), bytes_max)]
    usual_bytes = max(_USUAL_BYTES_MIN, _USUAL_RATIO * len(data))
    return [usual_bytes, bytes_max] if inline_max < usual_bytes < bytes_max else [bytes_max]


def working_bytes(table: TableInfo, bytes_max: int) -> int:
    """Return the working memory for reading records of up to `bytes_max` bytes."""
    return bytes_max * (_RAW_WORKING if _is_raw(table) else _COLUMNS_WORKING)


def _is_raw(table: TableInfo) -> bool:
    form = table.descriptor.record_format()
    is_raw_key = not form.key_columns or form.key is KeyFormat.RAW
    return form.value is ValueFormat.RAW and is_raw_key


def place_of(
    data: bytes, partition: int, *, is_damaged: bool = False
) -> tuple[int, RecordSequence] | None:
    """Return the writer and sequence of an unread batch; None if the batch has no sequence.

    Raises InvalidRecordsError; for a damaged batch only if the header is impossible.
    """
    header = open_batch(memoryview(data), is_damaged=is_damaged)[0]
    sequence = _sequence(header)
    return None if sequence is None else (writer_of(header.producer_id, partition), sequence)


def _sequence(batch: BatchHeader) -> RecordSequence | None:
    """Return the producer's sequence of a batch; None if the producer does not number batches.

    Raises for a batch forbidden to producers.
    """
    if batch.is_control or batch.is_transactional:
        raise UnsupportedError(TRANSACTIONS)
    if batch.record_count < 1 or not batch.is_dense:
        raise InvalidRecordsError(
            f"{batch.record_count} records up to number {batch.last_offset_delta} are no batch of a"
            " producer, which numbers records from 0 on without gaps"
        )
    if batch.producer_id == NO_PRODUCER:
        return None
    if batch.producer_id < 0 or batch.base_sequence < 0:
        raise InvalidRecordsError(
            f"producer {batch.producer_id} with sequence {batch.base_sequence} is invalid: both"
            " must be 0 or more"
        )
    if not 0 <= batch.producer_epoch <= EPOCH_MAX:
        raise InvalidRecordsError(f"producer epoch {batch.producer_epoch} is invalid")
    if batch.record_count > RECORDS_MAX:
        raise InvalidRecordsError(
            f"{batch.record_count} records in a batch of an idempotent producer; at most"
            f" {RECORDS_MAX}, send smaller batches",
            fault=RecordsFault.TOO_LARGE,
        )
    return RecordSequence(batch.producer_epoch, batch.base_sequence, batch.record_count)


def _refusal(rows: CheckedRows, table: TableInfo) -> RefusedRecordsError:
    position, misfit = rows.first_misfit()
    error = RefusedRecordsError(
        f"produce to '{table.path}': {len(rows.misfits)} records do not fit, the first is record"
        f" {position} of its batch: {_why(misfit)}; nothing of the batch is stored"
    )
    error.cause = check_failed(str(table.path), rows)
    shown = itertools.islice(rows.misfits.items(), _RECORD_ERRORS_MAX)
    error.record_errors = [(at, _why(misfit)) for at, misfit in shown]
    return error


def _why(misfit: Misfit) -> str:
    return misfit.reason if misfit.column is None else f"column '{misfit.column}': {misfit.reason}"


def _with_change_types(checked: CheckedRows) -> CheckedRows:
    """Return the rows with a change type for each row, if the rows are changes."""
    if checked.operations is None:
        return checked
    codes = np.where(checked.operations == OPERATION_DELETE, DELETE, UPDATE_AFTER)
    types = pa.array(codes.astype(np.int8))
    return replace(checked, rows=checked.rows.append_column(CHANGE_TYPE_COLUMN, types))
