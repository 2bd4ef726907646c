"""Record batches as other clients of Kafka wrote them, byte for byte.

`kafka_batches/` was written by `python -m tests.golden.test_golden_kafka_batches`, where aiokafka
0.14.0 and kafka-python 3.0.12 are installed: the same records in each compression by each client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.kafka.records.batches import Compression, read_batch, write_batch
from tests.support.record_batch_model import Record, columns_of, records_of

_GOLDEN = Path(__file__).parent / "kafka_batches"
_FILES = sorted(path.name for path in _GOLDEN.glob("*.bin"))


def golden_records() -> tuple[Record, ...]:
    """Return records of every shape: nulls, empty ones, headers, times before the first."""
    some = [
        Record(b"key", b"value", 1_700_000_000_000),
        Record(None, b"no key", 1_700_000_000_123),
        Record(b"no value", None, 1_699_999_999_000),
        Record(b"", b"", 1_700_000_000_000),
        Record(b"headers", b"two", 1_700_000_009_999, (("trace", b"\x00\xff"), ("größe", None))),
        Record(b"headers", b"of one key", 1_700_000_000_000, (("a", b""), ("a", b"again"))),
        Record(None, bytes(range(256)) * 40, 1_700_000_000_000),
    ]
    many = [Record(None, b'{"id": %d}' % number, 1_700_000_000_000) for number in range(100)]
    return tuple(
        Record(r.key, r.value, r.timestamp_ms, r.headers, delta)
        for delta, r in enumerate([*some, *many])
    )


@pytest.mark.parametrize("name", _FILES)
def test_other_clients_batches_read_as_their_records(name: str) -> None:
    data = (_GOLDEN / name).read_bytes()

    batch = read_batch(memoryview(data), bytes_max=1 << 20, records_max=1000)

    assert records_of(batch.columns, batch.offset_deltas.tolist()) == golden_records()
    header = batch.header
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (123, 4, 56)


@pytest.mark.parametrize("client", ["aiokafka", "kafka_python"])
def test_records_are_written_as_other_clients_write_them(client: str) -> None:
    pieces = write_batch(columns_of(golden_records()), base_offset=0)

    records = b"".join(pieces[1:])
    assert (_GOLDEN / f"{client}_none.bin").read_bytes()[len(pieces[0]) :] == records


def test_there_is_a_file_of_each_client_and_compression() -> None:
    assert (
        sorted(
            f"{client}_{compression.name.lower()}.bin"
            for client in ("aiokafka", "kafka_python")
            for compression in Compression
        )
        == _FILES
    )


def _write_golden_files() -> None:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

    builders: dict[str, Any] = {"aiokafka": AiokafkaBuilder, "kafka_python": KafkaPythonBuilder}
    for client, make_builder in builders.items():
        for compression in Compression:
            builder = make_builder(
                magic=2, compression_type=int(compression), is_transactional=False,
                producer_id=123, producer_epoch=4, base_sequence=56, batch_size=1 << 20,
            )  # fmt: skip
            for record in golden_records():
                builder.append(
                    record.offset_delta,
                    timestamp=record.timestamp_ms,
                    key=record.key,
                    value=record.value,
                    headers=list(record.headers),
                )
            path = _GOLDEN / f"{client}_{compression.name.lower()}.bin"
            path.write_bytes(bytes(builder.build()))


if __name__ == "__main__":
    _write_golden_files()
