"""Record batches, the encoding of records between Kafka's clients and brokers, and columns."""

from __future__ import annotations

from streamhouse.storage_service.kafka.records.batches import (
    Compression,
    ReadBatch,
    read_batch,
    read_batches,
    write_batch,
)
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE, RecordColumns

__all__ = [
    "HEADERS_TYPE",
    "Compression",
    "ReadBatch",
    "RecordColumns",
    "read_batch",
    "read_batches",
    "write_batch",
]
