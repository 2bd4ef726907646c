"""A log equals a list of batches under any order of appends, reads, rolls, retention, restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
)

from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.writer_state import FIRST_SEQUENCE
from tests.support.crash_filesystem import Crash, CrashFilesystem
from tests.support.examples import examples
from tests.support.log_world import LogModel, ModelBatch, SettableClock, open_log


class LogMachine(RuleBasedStateMachine):
    """Drives a real log and the model side by side."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashFilesystem(0)
        self.clock = SettableClock(1000)
        self.model = LogModel()
        self.options = {"segment_bytes_max": 700, "index_interval_bytes": 200}
        self.log = open_log(self.disk, clock_us=self.clock, **self.options)
        self.timestamps: list[tuple[int, int]] = []

    @rule(
        target=sent,
        sizes=st.lists(
            st.tuples(st.integers(1, 300), st.integers(1, 50), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        ),
    )
    def append_group(self, sizes: list[tuple[int, int, int]]) -> object:
        batches: list[ModelBatch] = []
        for size, rows, writer_id in sizes:
            queued = sum(batch.writer_id == writer_id for batch in batches)
            sequence = self.model.next_sequence.get(writer_id, FIRST_SEQUENCE) + queued
            payload = bytes((self.model.end_offset + n) % 251 for n in range(size))
            batch = ModelBatch(payload, rows, rows % 5, writer_id, sequence if writer_id else 0)
            batches.append(batch)
        self._send(batches)
        return multiple(*[batch for batch in batches if batch.writer_id])

    def _send(self, batches: list[ModelBatch]) -> None:
        results = [
            self.log.append(
                RoutedBatch(
                    0,
                    batch.row_count,
                    batch.payload,
                    batch.schema_id,
                    writer_id=batch.writer_id,
                    sequence=batch.sequence,
                )
            )
            for batch in batches
        ]
        self.log.flush()
        self.log.publish()
        for batch, result in zip(batches, results, strict=True):
            self.model.acknowledge(batch, result)
            if not result.is_duplicate:
                self.timestamps.append((result.base_offset, result.timestamp_us))

    @rule(batch=sent)
    def repeat(self, batch: ModelBatch) -> None:
        last = self.model.next_sequence[batch.writer_id] - 1
        if batch.sequence > last - 5:
            self._send([batch])

    @rule(by=st.integers(-300, 1000))
    def move_clock(self, by: int) -> None:
        self.clock.now_us += by

    @rule(age=st.integers(-100, 2000), offset_max=st.integers(0, 500))
    def retain(self, age: int, offset_max: int) -> None:
        self.log.apply_retention(timestamp_us_before=self.clock.now_us - age, offset_max=offset_max)
        self.model.log_start_max = max(self.model.log_start_max, offset_max)

    @rule(crash=st.sampled_from([None, *Crash]))
    def restart(self, crash: Crash | None) -> None:
        if crash is None:
            self.log.close()
        else:
            self.disk.restart(crash)
        self.log = open_log(self.disk, clock_us=self.clock, **self.options)

    @rule(data=st.data(), bytes_max=st.integers(0, 900))
    def read_somewhere(self, data: st.DataObject, bytes_max: int) -> None:
        start, end = self.log.log_start_offset, self.log.high_watermark
        offset = data.draw(st.integers(start, end))
        end_offset = data.draw(st.none() | st.integers(0, end + 3))

        batches = self.log.read(offset, bytes_max=bytes_max, end_offset=end_offset)

        limit = end if end_offset is None else min(end, end_offset)
        if offset >= limit:
            assert batches == []
            return
        assert batches[0].base_offset <= offset < batches[0].end_offset
        assert all(batch.base_offset < limit for batch in batches)
        total = sum(len(batch.payload) for batch in batches)
        assert len(batches) == 1 or total <= bytes_max
        if batches[-1].end_offset < limit:
            following = dict(self.model.acknowledged)[batches[-1].end_offset]
            assert total + len(following.payload) > bytes_max

    @rule(timestamp_us=st.integers(0, 8000))
    def find_timestamp(self, timestamp_us: int) -> None:
        start = self.log.log_start_offset
        expected = self.log.high_watermark
        for offset, stamped in reversed(self.timestamps):
            if offset >= start and stamped >= timestamp_us:
                expected = offset
        assert self.log.offset_for_timestamp(timestamp_us) == expected

    @invariant()
    def log_equals_model(self) -> None:
        self.model.check(self.log)


LogMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=25)
TestLogEqualsModel = LogMachine.TestCase
