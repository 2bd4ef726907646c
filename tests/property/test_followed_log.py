"""A followed log answers as the log that is followed, whatever happens to that log.

The life is random: groups of batches, rolls, rows that are durable and hidden for a while, as those
of transactions, groups that the disk takes back, retention, overwrites, restarts, damaged payloads.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.log.segments.segment_format import offsets_of, segment_path
from tests.support.log_world import SettableClock, open_log


class _Life:
    """A log with a random life, and a follower."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.directory = directory
        self.clock = SettableClock()
        self.options = {
            "segment_bytes_max": self.random.choice((300, 3_000, 60_000)),
            "index_interval_bytes": self.random.choice((100, 4_096)),
        }
        self.log = self._opened()
        self.follower: FollowedLog | None = None
        self.payloads: dict[int, bytes] = {}
        self.damaged: list[range] = []
        """The offsets of batches with a damaged payload."""

    def _opened(self) -> LogTablet:
        return open_log(
            LocalFilesystem(), directory=self.directory, clock_us=self.clock, **self.options
        )

    def step(self) -> None:
        log, random = self.log, self.random
        self.clock.now_us += random.choice((0, 1, 1_000))
        what = random.random()
        if what < 0.6:
            self._append()
        elif what < 0.7:
            log.publish()
        elif what < 0.78:
            log.apply_retention(
                timestamp_us_before=self.clock.now_us - random.choice((0, 3_000)),
                offset_max=random.randint(0, log.high_watermark),
            )
        elif what < 0.82:
            log.truncate(random.randint(log.log_start_offset, log.high_watermark))
        elif what < 0.86:
            self._restart()
        elif what < 0.9:
            # Another follower begins in the middle.
            self.follower = None

    def _append(self) -> None:
        log, random = self.log, self.random
        payloads = {}
        for _ in range(random.randint(1, 4)):
            payload = random.randbytes(random.choice((1, 50, 900, 9_000)))
            batch = RoutedBatch(0, random.randint(1, 5), payload, random.randint(1, 3))
            payloads[log.append(batch).base_offset] = payload
        if random.random() < 0.15:
            log.write()
            log.rollback()
            log.sync()
            return
        log.flush()
        self.payloads.update(payloads)
        if random.random() < 0.7:
            log.publish(random.choice((None, log.log_end_offset)))

    def _restart(self) -> None:
        if self.damaged:
            return
        truncated = self.log.log_start_offset
        self.log.close()
        self.log = self._opened()
        self.log.truncate(truncated)

    def damage(self) -> None:
        """Change the last byte of a published batch's payload."""
        log = self.log
        if log.log_start_offset == log.high_watermark:
            return
        offset = self.random.randint(log.log_start_offset, log.high_watermark - 1)
        try:
            batch = log.read(offset, bytes_max=1)[0]
        except CorruptDataError:
            return
        if len(batch.payload) < 50:
            # Too short to be found among others.
            return
        bases = offsets_of((path.name for path in self.directory.iterdir()), ".log")
        path = segment_path(self.directory, max(b for b in bases if b <= batch.base_offset))
        data = path.read_bytes()
        at = data.find(bytes(batch.payload)) + len(batch.payload) - 1
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))
        self.damaged.append(range(batch.base_offset, batch.end_offset))

    def published(self) -> FollowedLog:
        """Return the follower, told what is published."""
        log = self.log
        if self.follower is None:
            self.follower = FollowedLog(
                self.directory,
                table_id=7,
                bucket=0,
                filesystem=LocalFilesystem(),
                start_offset=log.log_start_offset,
                high_watermark=log.high_watermark,
            )
        self.follower.publish(log.log_start_offset, log.high_watermark)
        return self.follower

    def check(self) -> None:
        log, random, follower = self.log, self.random, self.published()
        assert follower.log_start_offset == log.log_start_offset
        assert follower.high_watermark == log.high_watermark
        for _ in range(4):
            offset = random.randint(max(log.log_start_offset - 2, 0), log.high_watermark + 2)
            end = random.choice((None, random.randint(offset, log.high_watermark + 2)))
            bytes_max = random.choice((1, 400, 1 << 30))
            expected = _outcome(log, offset, bytes_max, end)
            outcome = _outcome(follower, offset, bytes_max, end)
            if not self.damaged:
                assert outcome == expected
            elif isinstance(outcome, list):
                # Good bytes in memory may outlive the file's.
                assert all(self.payloads[base] == payload for base, *_, payload in outcome)
            elif outcome is CorruptDataError:
                assert any(offset in damaged for damaged in self.damaged)
            else:
                assert outcome == expected
        timestamp_us = random.randint(self.clock.now_us - 5_000, self.clock.now_us + 10)
        offset = random.randint(log.log_start_offset, log.high_watermark)
        if not self.damaged:
            found = follower.offset_for_timestamp(timestamp_us)
            assert found == log.offset_for_timestamp(timestamp_us)
        assert follower.fingerprint(offset) == log.fingerprint(offset)


def _outcome(log: ReadableLog, offset: int, bytes_max: int, end: int | None) -> object:
    try:
        batches = log.read(offset, bytes_max=bytes_max, end_offset=end)
    except StreamhouseError as error:
        return type(error)
    return [
        (b.base_offset, b.row_count, b.timestamp_us, b.schema_id, bytes(b.payload)) for b in batches
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_follower_reads_what_the_log_reads(tmp_path: Path, seed: int) -> None:
    life = _Life(tmp_path, seed)
    for _ in range(80):
        life.step()
        if life.random.random() < 0.5:
            life.check()
    life.check()
    life.log.close()


@pytest.mark.parametrize("seed", range(60))
def test_a_follower_never_returns_damaged_rows(tmp_path: Path, seed: int) -> None:
    life = _Life(tmp_path, seed)
    for _ in range(60):
        life.step()
        if life.random.random() < 0.1:
            life.damage()
        if life.random.random() < 0.5:
            life.check()
    life.log.close()
