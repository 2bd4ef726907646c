"""Sequences of Kafka's producers: judged as a broker does, once in every bucket across crashes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import FencedError, OutOfOrderSequenceError
from streamhouse.core.model.records.record_sequence import (
    RECORDS_MAX,
    SEQUENCE_COUNT,
    Continuity,
    RecordSequence,
)
from streamhouse.storage_service.kafka.sequences import ProducerOrder, Repeated, writer_of
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.crash_filesystem import Crash, CrashFilesystem, SimulatedCrash
from tests.support.examples import examples
from tests.support.log_world import open_log, read_all

_WRITER = 7
_OPTIONS = {"segment_bytes_max": 900, "index_interval_bytes": 200}
_WINDOW = 5


@dataclass
class Broker:
    """What Kafka's `ProducerStateEntry` and `ProducerAppendInfo` do for one producer.

    Written from them: `findDuplicateBatch`, `checkProducerEpoch`, `checkSequence`, `inSequence`,
    `addBatch`. Only an unknown producer is asked for sequence 0.
    """

    epoch: int = -1
    batches: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    end_offset: int = 0

    def append(self, epoch: int, first: int, count: int) -> tuple[str, int]:
        """Return what becomes of a batch and its first offset."""
        last = (first + count - 1) % SEQUENCE_COUNT
        if epoch == self.epoch:
            for known_first, known_last, offset in self.batches:
                if (known_first, known_last) == (first, last):
                    return "repeated", offset
        if epoch < self.epoch:
            return "fenced", -1
        if epoch != self.epoch:
            if first != 0:
                return ("unknown" if self.epoch < 0 else "out of order"), -1
        elif not self._is_next(self.batches[-1][1], first):
            return "out of order", -1
        if epoch != self.epoch:
            self.batches.clear()
        self.epoch = epoch
        self.batches.append((first, last, self.end_offset))
        self.end_offset += count
        return "new", self.batches[-1][2]

    @staticmethod
    def _is_next(last: int, first: int) -> bool:
        return first == last + 1 or (first == 0 and last == SEQUENCE_COUNT - 1)


def _judged(log: LogTablet, sequence: RecordSequence) -> tuple[str, int]:
    batch = RoutedBatch(
        0,
        sequence.record_count,
        b"%d" % sequence.base,
        writer_id=_WRITER,
        sequence=sequence.packed(),
    )
    try:
        result = log.append(batch)
    except FencedError:
        return "fenced", -1
    except OutOfOrderSequenceError as error:
        return ("unknown" if error.is_unknown_writer else "out of order"), -1
    return ("repeated" if result.is_duplicate else "new"), result.base_offset


def _next_sequence(random: Random, broker: Broker, sent: list[RecordSequence]) -> RecordSequence:
    """Return the sequence of a batch as clients send them, right or wrong."""
    count = random.choice([1, 1, 2, 7, RECORDS_MAX])
    epoch = max(broker.epoch, 0)
    last = broker.batches[-1][1] if broker.batches else -1
    right = RecordSequence(epoch, (last + 1) % SEQUENCE_COUNT, count)
    kind = random.randrange(12)
    if kind < 6 or not sent:
        return right
    if kind < 9:
        return random.choice(sent[-7:])
    if kind == 9:
        return right._replace(base=(right.base + random.choice([1, -1, 3])) % SEQUENCE_COUNT)
    if kind == 10:
        again = random.choice(sent[-3:])
        return again._replace(record_count=again.record_count % RECORDS_MAX + 1)
    return RecordSequence(
        max(epoch + random.choice([1, 1, -1]), 0), random.choice([0, 0, 5]), count
    )


@settings(max_examples=examples(60))
@given(seed=st.integers(0, (1 << 32) - 1))
def test_a_log_judges_batches_as_a_broker_does_across_crashes(seed: int) -> None:
    random = Random(seed)
    disk = CrashFilesystem(random.randrange(1 << 30))
    log = open_log(disk, **_OPTIONS)
    broker, sent = Broker(), list[RecordSequence]()
    if random.random() < 0.5:
        # Close to where sequences begin again.
        near = SEQUENCE_COUNT - random.randrange(1, 20)
        first = RecordSequence(0, near - 1, 1)
        log.append(
            RoutedBatch(0, 1, b"x", 0, _WRITER, first.packed(), continuity=Continuity.UNKNOWN)
        )
        broker.epoch, broker.end_offset = 0, 1
        broker.batches.append((first.base, first.base, 0))
        log.flush()
    for _ in range(40):
        sequence = _next_sequence(random, broker, sent)
        expected = broker.append(*sequence)
        assert _judged(log, sequence) == expected, sequence
        if expected[0] == "new":
            sent.append(sequence)
        if random.random() < 0.3:
            log.flush()
            log.publish()
        if random.random() < 0.15:
            log.flush()
            if random.random() < 0.5:
                log.close()
            else:
                disk.restart(random.choice(list(Crash)))
            log = open_log(disk, **_OPTIONS)
    log.flush()
    log.publish()
    assert sum(batch.row_count for batch in read_all(log)) == broker.end_offset


# -- one producer, one partition, several buckets -----------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Values that are set under keys; a key is in the bucket that its first letter says."""

    sequence: RecordSequence
    rows: tuple[tuple[str, int], ...]

    def parts(self) -> Iterator[tuple[int, list[tuple[str, int]]]]:
        for bucket in sorted({int(key[0]) for key, _ in self.rows}):
            yield bucket, [row for row in self.rows if int(row[0][0]) == bucket]


def _changes(rows: list[tuple[str, int]], state: dict[str, int]) -> list[tuple[str, int]]:
    """Return which rows change something, and change it."""
    changed = []
    for key, value in rows:
        if state.get(key) != value:
            state[key] = value
            changed.append((key, value))
    return changed


class _Service:
    """The buckets of a table, and what a process knows of its producers."""

    def __init__(self, random: Random, buckets: int) -> None:
        self.disk = CrashFilesystem(random.randrange(1 << 30))
        self.buckets = buckets
        self.open()

    def open(self) -> None:
        self.order: ProducerOrder[str] = ProducerOrder()
        self.logs = [
            open_log(self.disk, directory=Path(f"/tables/7/bucket-{b}"), bucket=b, **_OPTIONS)
            for b in range(self.buckets)
        ]
        self.states = [dict(rows) for rows in self.stored()]

    def stored(self) -> list[list[tuple[str, int]]]:
        return [
            [
                (key, int(value))
                for batch in read_all(log)
                for key, value in (t.split("=") for t in bytes(batch.payload).decode().split())
            ]
            for log in self.logs
        ]

    def take(self, batch: _Batch) -> str:
        """Store a batch as the engine does: its parts as one unit, one log after the other."""
        admitted = self.order.admit(_WRITER, batch.sequence)
        if isinstance(admitted, Repeated):
            return "repeated"
        touched = []
        for bucket, rows in batch.parts():
            log, packed = self.logs[bucket], batch.sequence.packed()
            if log.find_batch(_WRITER, sequence=packed, continuity=admitted):
                continue
            changed = _changes(rows, self.states[bucket])
            if changed:
                text = " ".join(f"{key}={value}" for key, value in changed).encode()
                routed = RoutedBatch(bucket, len(changed), text, 0, _WRITER, packed)
                log.append(routed._replace(continuity=admitted))
                touched.append(log)
        for log in touched:
            log.write()
        for log in touched:
            log.sync()
            log.publish()
        self.order.stored(_WRITER, batch.sequence, "stored")
        return "stored"


def _batches(random: Random, *, buckets: int, count: int) -> list[_Batch]:
    base = random.choice([0, 0, SEQUENCE_COUNT - random.randrange(1, 30), SEQUENCE_COUNT // 2])
    batches, epoch = [], 3
    for _ in range(count):
        size = random.randrange(1, 4)
        rows = tuple(
            (f"{random.randrange(buckets)}{random.choice('ab')}", random.randrange(3))
            for _ in range(size)
        )
        # Records of rows that were rejected are counted, too.
        records = random.choice([size, size + 2, RECORDS_MAX])
        sequence = RecordSequence(epoch, base, records)
        batches.append(_Batch(sequence, rows))
        base = sequence.next_base
        if random.random() < 0.05:
            epoch, base = epoch + 1, 0
    return batches


@settings(max_examples=examples(200))
@given(seed=st.integers(0, (1 << 32) - 1))
def test_a_divided_batch_happens_once_in_every_bucket_across_crashes(seed: int) -> None:
    """Five batches are in flight; answers are lost, processes die between two logs' writes."""
    random = Random(seed)
    buckets = random.choice([1, 2, 3])
    batches = _batches(random, buckets=buckets, count=random.randrange(1, 25))
    expected: dict[int, list[tuple[str, int]]] = {b: [] for b in range(buckets)}
    truth: list[dict[str, int]] = [{} for _ in range(buckets)]
    for batch in batches:
        for bucket, rows in batch.parts():
            expected[bucket] += _changes(rows, truth[bucket])

    service, answered = _Service(random, buckets), 0
    while answered < len(batches):
        in_flight = batches[answered : answered + random.randrange(1, _WINDOW + 1)]
        # A new epoch begins when nothing of the old one is on its way.
        epoch = in_flight[0].sequence.epoch
        in_flight = [batch for batch in in_flight if batch.sequence.epoch == epoch]
        if random.random() < 0.4:
            service.disk.crash_step = service.disk.steps + random.randrange(1, 8)
        # From here on answers do not arrive, though batches are stored.
        lost_from = random.randrange(len(in_flight) + 3)
        overloaded = random.randrange(len(in_flight) * 3)
        try:
            for number, batch in enumerate(in_flight):
                if number == overloaded:
                    # It has its place, is refused for now, and with it all that came behind it.
                    if isinstance(service.order.admit(_WRITER, batch.sequence), Repeated):
                        break
                    for later in in_flight[number + 1 :]:
                        with pytest.raises(OutOfOrderSequenceError):
                            service.take(later)
                    break
                service.take(batch)
                if number < lost_from:
                    answered += 1
        except SimulatedCrash:
            service.disk.restart(random.choice(list(Crash)))
            service.open()
        service.disk.crash_step = None

    assert dict(enumerate(service.stored())) == expected


def test_writers_of_a_producer_are_one_a_partition() -> None:
    writers = {writer_of(producer, partition) for producer in range(30) for partition in range(30)}

    assert len(writers) == 900
    assert all(0 < writer < (1 << 64) - 1 for writer in writers)
    assert writer_of(5, 1) == writer_of(5, 1)
