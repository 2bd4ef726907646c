"""Record batches as producers send them, with whatever a test wants to say in the header."""

from __future__ import annotations

from collections.abc import Sequence

from streamhouse.storage_service.kafka.records.batch_header import header_bytes, open_batch
from streamhouse.storage_service.kafka.records.batches import Compression, write_batch
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from tests.support.kafka_records import columns_of

__all__ = ["produced", "records"]


def records(
    values: Sequence[bytes | None], *, keys: Sequence[bytes | None] | None = None
) -> RecordColumns:
    """Return records of these values, without keys if none are given."""
    return columns_of(values, keys, ms=[5] * len(values))


def produced(
    columns: RecordColumns,
    *,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    is_transactional: bool = False,
    compression: Compression = Compression.NONE,
) -> bytes:
    """Return a batch of a producer; without a producer id it is not idempotent."""
    written = b"".join(write_batch(columns, base_offset=0, compression=compression))
    header, body, _ = open_batch(memoryview(written))
    header = header._replace(
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=is_transactional,
    )
    return header_bytes(header, [body]) + body
