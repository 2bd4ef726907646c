"""What Kafka clients cost: record batches alone, and records on their way in and out of a service.

Record batches are read into columns and written from them in one thread: records of 100 bytes in
batches of 10,000, as librdkafka sends them when it is busy, and of 160, the 16 KiB of Java's client
as it comes. The limit is what must be done whatever reads and writes them: their checksum and one
copy. It is far from what any client's library reaches: aiokafka's C extension reads 1.9 M records/s
and writes 2.3 to 3.5 M on such a machine, and makes an object of each.

A real service is sent Produce requests of these batches, made beforehand, by two connections to two
partitions with five requests in flight, and then Fetch requests of all of it. What counts is the
service's processor, all its threads together. The limit is what the service takes for the same rows
in Arrow, appended and fetched over HTTP by the Python client. Of batches of 160 what counts is the
time of a request, beside that of an append of as many rows.
"""

from __future__ import annotations

import json
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import crc32c
import numpy as np
import pyarrow as pa

from benchmarks.harness import process_cpu_seconds, processor_rate, report
from benchmarks.kafka_frames import (
    FrameSocket,
    fetch_frame,
    fetched,
    produce_frame,
    produced_error,
)
from streamhouse.client import StorageClient
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.kafka.records import (
    HEADERS_TYPE,
    Compression,
    RecordColumns,
    read_batch,
    write_batch,
)
from tests.support.service_process import ServiceProcess

VALUE_BYTES: Final = 100
RECORDS: Final = 200_000
REPEATS: Final = 9
BAR_RECORDS: Final = 1_000_000
BAR_RECORDS_HEADERS: Final = 200_000
BAR_JSON: Final = 500_000
PARTITIONS: Final = 2
IN_FLIGHT: Final = 5
FETCH_BYTES: Final = 4 << 20

ROWS: Final = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
_BATCH: Final = struct.Struct(">qi")
SMALL_RATIO_MIN: Final = 0.9
_PREPARED_MAX_S: Final = 60.0
_BATCH_LAST: Final = struct.Struct(">i")


def main() -> None:
    """Report records/s of reading and of writing, for each kind of batch."""
    _report_kind(_columns(10_000), "values", bar=BAR_RECORDS)
    _report_kind(_columns(160), "values", bar=None)
    keyed = _columns(10_000, has_keys=True)
    _report_kind(keyed, "keys and values", bar=BAR_RECORDS)
    headed = _columns(10_000, has_keys=True, header_count=3)
    _report_kind(headed, "keys, values and 3 headers", bar=BAR_RECORDS_HEADERS)
    for compression in list(Compression)[1:]:
        name = f"values, {compression.name.lower()}"
        _report_kind(_columns(10_000), name, bar=None, compression=compression)
    with (
        tempfile.TemporaryDirectory() as directory,
        # As a user starts it: what it imports beside is not measured.
        ServiceProcess(directory, "--kafka-port", "0", is_executed=True) as service,
        StorageClient(service.endpoint) as client,
    ):
        door = _Door(service, client)
        door.report_raw(batch_records=10_000, batches=200)
        door.report_raw(batch_records=160, batches=2_000)
        door.report_json(batch_records=10_000, batches=100)
        door.report_json(batch_records=160, batches=2_000)


def _columns(record_count: int, *, has_keys: bool = False, header_count: int = 0) -> RecordColumns:
    rng = np.random.default_rng(0)
    # Letters, half as dense as they could be: what compresses is compressed by two.
    letters = rng.integers(97, 113, (record_count, VALUE_BYTES), dtype=np.uint8)
    keys = [b"customer-%08d" % number for number in range(record_count)]
    header = [{"key": "trace", "value": b"0123456789abcdef"}] * header_count
    return RecordColumns(
        keys=pa.array(keys) if has_keys else pa.nulls(record_count, pa.binary()),
        values=pa.array([row.tobytes() for row in letters]),
        timestamps_ms=1_700_000_000_000 + np.arange(record_count) // 10,
        headers=pa.array([header] * record_count, HEADERS_TYPE) if header_count else None,
    )


def _report_kind(
    columns: RecordColumns,
    name: str,
    *,
    bar: int | None,
    compression: Compression = Compression.NONE,
) -> None:
    batch = b"".join(write_batch(columns, base_offset=0, compression=compression))
    view = memoryview(batch)
    plain = b"".join(write_batch(columns, base_offset=0))

    def read() -> None:
        read_batch(view, bytes_max=1 << 30, records_max=1 << 20)

    def write() -> None:
        write_batch(columns, base_offset=0, compression=compression)

    limit = _rate(lambda: (crc32c.crc32c(plain), bytearray(plain)), len(columns))
    for verb, work in (("read", read), ("written", write)):
        rate = _rate(work, len(columns))
        report(
            f"records {verb}: {name}, {VALUE_BYTES} bytes each, {len(columns):,} a batch",
            measured=f"{rate / 1e6:.2f} M records/s of processor",
            limit=f"CRC-32C and a copy: {limit / 1e6:.1f} M records/s",
            ratio=rate / limit,
            bar="not set" if bar is None else f"at least {bar / 1e6:g} M records/s",
            reached=None if bar is None else rate >= bar,
        )


class _Door:
    """A service and its Kafka door, and what it takes to be measured."""

    def __init__(self, service: ServiceProcess, client: StorageClient) -> None:
        self._service = service
        self._client = client
        # What the door makes once, beside its work, is no record's price.
        deadline_s = time.monotonic() + _PREPARED_MAX_S
        while "event=kafka_messages_prepared" not in service.log_text():
            assert time.monotonic() < deadline_s, "the door did not make its messages"
            time.sleep(0.05)

    def report_raw(self, *, batch_records: int, batches: int) -> None:
        """Report raw records in, and out again."""
        columns = _columns(batch_records)
        rows = pa.RecordBatch.from_arrays(
            [
                columns.keys,
                columns.values,
                pa.array(columns.timestamps_ms * 1_000, RAW_TOPIC.field("timestamp").type),
                pa.nulls(batch_records, HEADERS_TYPE),
            ],
            schema=RAW_TOPIC,
        )
        kind = f"raw records of {VALUE_BYTES} bytes, {batch_records:,} a batch"
        is_judged = batch_records >= 10_000
        bar = BAR_RECORDS if is_judged else None
        topic, twin = f"raw_{batch_records}", f"raw_{batch_records}_http"
        for name in (topic, twin):
            self._create(name, RAW_TOPIC)
        ratio_min = None if is_judged else SMALL_RATIO_MIN
        self._report_produced(
            kind, topic, twin, columns, rows, batches, bar=bar, ratio_min=ratio_min
        )
        record_count = batches * batch_records
        rate = record_count / self._seconds(lambda: self._fetch_all(topic, record_count))
        limit = record_count / self._seconds(lambda: self._fetch_rows(twin, record_count))
        _report_service(f"fetched: {kind}", rate, limit, bar=bar, how="fetched")

    def report_json(self, *, batch_records: int, batches: int) -> None:
        """Report JSON objects in."""
        ids = np.arange(batch_records)
        names = [f"customer-{number * 7919 % 1_000_000:06}" for number in range(batch_records)]
        rows = pa.RecordBatch.from_arrays(
            [pa.array(ids), pa.array(names), pa.array(ids / 8)], schema=ROWS
        )
        values = [json.dumps(row).encode() for row in rows.to_pylist()]
        columns = RecordColumns(
            keys=pa.nulls(batch_records, pa.binary()),
            values=pa.array(values),
            timestamps_ms=1_700_000_000_000 + ids,
        )
        topic, twin = f"rows_{batch_records}", f"rows_{batch_records}_http"
        for name in (topic, twin):
            self._create(name, ROWS)
        kind = f"JSON objects of 3 columns, {batch_records:,} a batch"
        bar = BAR_JSON if batch_records >= 10_000 else None
        self._report_produced(kind, topic, twin, columns, rows, batches, bar=bar)

    def _create(self, name: str, schema: pa.Schema) -> None:
        properties = {"table.datalake.enabled": "false"}
        self._client.create_table(name, schema, bucket_count=PARTITIONS, properties=properties)

    def _report_produced(
        self,
        kind: str,
        topic: str,
        twin: str,
        columns: RecordColumns,
        rows: pa.RecordBatch,
        batches: int,
        *,
        bar: int | None,
        ratio_min: float | None = None,
    ) -> None:
        records = b"".join(write_batch(columns, base_offset=0))
        # The first requests of a table are not those of every day.
        self._produce(topic, records, PARTITIONS)
        self._append(twin, rows, PARTITIONS)
        record_count = len(columns) * batches
        rate = record_count / self._seconds(lambda: self._produce(topic, records, batches))
        limit = record_count / self._seconds(lambda: self._append(twin, rows, batches))
        _report_service(
            f"produced: {kind}", rate, limit, bar=bar, ratio_min=ratio_min, how="appended"
        )

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the processor time of the service that some work takes."""
        before = process_cpu_seconds(self._service.pid)
        work()
        return process_cpu_seconds(self._service.pid) - before

    def _produce(self, topic: str, records: bytes, batches: int) -> None:
        def send(partition: int) -> None:
            with FrameSocket(self._service.kafka_address) as connection:
                frame = produce_frame(topic, partition, records)
                frames = [frame] * (batches // PARTITIONS)
                for answer in connection.pipelined(frames, in_flight=IN_FLIGHT):
                    assert produced_error(answer) == 0, answer

        _at_once([lambda p=p: send(p) for p in range(PARTITIONS)])

    def _append(self, table: str, rows: pa.RecordBatch, batches: int) -> None:
        def append() -> None:
            for _ in range(batches // PARTITIONS):
                self._client.append(table, rows)

        _at_once([append] * PARTITIONS)

    def _fetch_all(self, topic: str, record_count: int) -> None:
        with FrameSocket(self._service.kafka_address) as connection:
            for partition in range(PARTITIONS):
                # Those of the first requests are there, too.
                end = record_count // PARTITIONS
                offset = 0
                while offset < end:
                    connection.send(fetch_frame(topic, partition, offset, bytes_max=FETCH_BYTES))
                    error, records = fetched(connection.answer())
                    assert error == 0, error
                    *_, offset = _batch_ends(records)

    def _fetch_rows(self, table: str, record_count: int) -> None:
        for bucket in range(PARTITIONS):
            offset = 0
            while offset < record_count // PARTITIONS:
                found = self._client.fetch(table, bucket, offset, max_bytes=FETCH_BYTES)
                offset = found[-1].end_offset


def _batch_ends(records: bytes) -> Iterator[int]:
    """Yield the offset behind each whole batch of an answer to Fetch."""
    at = 0
    while at + 61 <= len(records):
        base_offset, size = _BATCH.unpack_from(records, at)
        if at + _BATCH.size + size > len(records):
            return
        yield base_offset + _BATCH_LAST.unpack_from(records, at + 23)[0] + 1
        at += _BATCH.size + size


def _at_once(works: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _report_service(
    name: str,
    rate: float,
    limit: float,
    *,
    bar: int | None,
    how: str,
    ratio_min: float | None = None,
) -> None:
    if ratio_min is not None:
        bar_text, reached = f"at least {ratio_min}", rate >= ratio_min * limit
    elif bar is not None:
        bar_text, reached = f"at least {bar / 1e6:g} M records/s", rate >= bar
    else:
        bar_text, reached = "not set", None
    report(
        name,
        measured=f"{rate / 1e6:.2f} M records/s of the service's processor",
        limit=f"the same rows {how} in Arrow over HTTP: {limit / 1e6:.2f} M/s",
        ratio=rate / limit,
        bar=bar_text,
        reached=reached,
    )


def _rate(work: Callable[[], object], record_count: int) -> float:
    """Return records a second of processor, the median of some turns."""
    calls = max(1, RECORDS // record_count // REPEATS)
    return processor_rate(work, record_count, turns=REPEATS, calls=calls)


if __name__ == "__main__":
    main()
