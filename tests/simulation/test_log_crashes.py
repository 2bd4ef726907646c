"""Every crash point and every disk error of a log's life, by seed.

A script of appends, rolls, retention runs and reopenings is run once to count its steps, then once
for each step with a fault there. Afterwards the log is opened again and has to equal the model:
acknowledged rows are there once, at their offsets, in order; refused rows never come back; rows
whose fate was open are there as a whole or not at all; a repetition is answered right.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path
from typing import Final

import pytest

from streamhouse.core.errors import StorageFailedError, UnknownOutcomeError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably
from streamhouse.storage_service.log.log_tablet import LogOptions, LogTablet
from streamhouse.storage_service.log.writer_state import FIRST_SEQUENCE
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import Operation
from tests.support.crash_filesystem import Crash, CrashFilesystem, SimulatedCrash
from tests.support.late_journal import LateJournal, files_after
from tests.support.log_world import LogModel, ModelBatch

# More seeds: STREAMHOUSE_SIMULATION_SEEDS=500 pytest tests/simulation/test_log_crashes.py
_SEEDS: Final = range(int(os.environ.get("STREAMHOUSE_SIMULATION_SEEDS", "6")))
_OPERATIONS: Final = 14
_DIRECTORY: Final = Path("/tables/7/bucket-0")
_OPTIONS: Final = LogOptions(segment_bytes_max=1500, index_interval_bytes=400)


class _Life:
    """A log, its model and the client that writes to it."""

    def __init__(self, seed: int) -> None:
        self.filesystem = CrashFilesystem(seed)
        self.door: Filesystem = self.filesystem
        self.model = LogModel()
        self._random = random.Random(seed)
        self._now_us = 1_000_000
        self._sent = 0
        self.tablet: LogTablet | None = None

    def run(self, operations: int) -> None:
        """Do so many things; the same seed does the same things."""
        self.open()
        for _ in range(operations):
            choice = self._random.random()
            if choice < 0.75:
                self.append_group()
            elif choice < 0.9:
                self.retain()
            else:
                self.reopen()

    def open(self) -> LogTablet:
        self.tablet = LogTablet.open(
            _DIRECTORY,
            table_id=7,
            bucket=0,
            filesystem=self.door,
            options=_OPTIONS,
            clock_us=self._clock_us,
        )
        return self.tablet

    def reopen(self) -> None:
        assert self.tablet is not None
        self.tablet.close()
        self.model.adopt_survivors(self.open())
        self.model.check(self.tablet)

    def _clock_us(self) -> int:
        # The clock is sometimes set back.
        self._now_us += self._random.choice((0, 1, 50, 900, -400))
        return self._now_us

    def _new_batch(self, queued: list[ModelBatch]) -> ModelBatch:
        self._sent += 1
        writer_id = self._random.choice((0, 1, 2))
        before = sum(batch.writer_id == writer_id for batch in queued)
        sequence = (
            self.model.next_sequence.get(writer_id, FIRST_SEQUENCE) + before if writer_id else 0
        )
        return ModelBatch(
            payload=f"batch {self._sent};".encode() * self._random.randint(1, 60),
            row_count=self._random.randint(1, 9),
            schema_id=self._sent % 3,
            writer_id=writer_id,
            sequence=sequence,
        )

    def append_group(self) -> None:
        batches: list[ModelBatch] = []
        for _ in range(self._random.randint(1, 4)):
            batches.append(self._new_batch(batches))
        self.send(batches)

    def send(self, batches: list[ModelBatch]) -> None:
        """Append, flush and publish; the model learns what the client learns."""
        assert self.tablet is not None
        self.model.open = list(batches)
        try:
            results = [
                self.tablet.append(
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
            self.tablet.flush()
        except StorageFailedError:
            # Refused: the model forgets them, so finding one later is an error.
            self.tablet.take_back(keep=0)
            self.model.open = []
        except UnknownOutcomeError:
            assert self.tablet.is_read_only
        else:
            self.tablet.publish()
            self.model.open = []
            for batch, result in zip(batches, results, strict=True):
                self.model.acknowledge(batch, result)
        if self.tablet.is_read_only:
            self.reopen()

    def retain(self) -> None:
        assert self.tablet is not None
        offset_max = self._random.randint(0, self.model.end_offset)
        self.model.log_start_max = max(self.model.log_start_max, offset_max)
        try:
            self.tablet.apply_retention(
                timestamp_us_before=self._now_us - self._random.choice((0, 2000)),
                offset_max=offset_max,
            )
        except StorageFailedError:
            if self.tablet.is_read_only:
                self.reopen()

    def recover_and_go_on(self) -> None:
        """After a restart: compare, repeat what was open, write more, compare again."""
        repeated = [batch for batch in self.model.open if batch.writer_id]
        tablet = self.open()
        self.model.adopt_survivors(tablet)
        self.model.check(tablet)
        if repeated:
            self.send(repeated)
        self.append_group()
        self.retain()
        self.append_group()
        self.reopen()


class _LastingJournal(LateJournal):
    """A journal that stores what is recorded at once; its machine is lost after `last` of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: int | None = None
        self.store_at_once()

    def record(self, operation: Operation) -> int:
        position = super().record(operation)
        if position == self.last:
            raise SimulatedCrash(f"after {operation}")
        return position


class _JournalledLife(_Life):
    """A life of several machines: each has what the journal has, and nothing of the one before."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.journal = _LastingJournal()
        self._record()

    def _record(self) -> None:
        files = files_after(self.journal.operations)
        self.door = JournaledFilesystem(
            self.filesystem,
            Path("/"),
            self.journal,
            log_bytes={name: len(data) for name, data in files.items() if name.endswith(".log")},
            on_failure=self._end,
        )

    @staticmethod
    def _end(why: str) -> None:
        raise SimulatedCrash(why)

    def move(self) -> None:
        """Go on where the disk is new."""
        self.filesystem = CrashFilesystem(self._random.randint(0, 1 << 30))
        for name, data in files_after(self.journal.operations).items():
            path = Path("/", name)
            self.filesystem.make_directory(path.parent)
            replace_durably(self.filesystem, path, [data])
        self._record()


def _steps_of(seed: int, kind: type[_Life] = _Life) -> list[tuple[str, str]]:
    life = kind(seed)
    life.run(_OPERATIONS)
    return life.filesystem.history


@pytest.mark.parametrize("crash", list(Crash))
@pytest.mark.parametrize("seed", _SEEDS)
def test_every_crash_point_keeps_acknowledged_rows(seed: int, crash: Crash) -> None:
    """Crash at each step of the script, then at a random step of the recovery, then go on."""
    for step in range(len(_steps_of(seed))):
        life = _Life(seed)
        life.filesystem.crash_step = step
        with pytest.raises(SimulatedCrash):
            life.run(_OPERATIONS)
        life.filesystem.restart(crash)
        life.filesystem.crash_step = step % 7
        with contextlib.suppress(SimulatedCrash):
            life.open()
        life.filesystem.restart(crash)

        life.recover_and_go_on()


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_disk_error_refuses_or_reports_and_loses_nothing(seed: int) -> None:
    """Fail each step in turn (disk full, I/O error); the log goes on, then the power fails."""
    for step, (operation, _) in enumerate(_steps_of(seed)):
        life = _Life(seed)
        code = errno.ENOSPC if operation in ("write", "create", "rename") else errno.EIO
        life.filesystem.errors = {step: code}
        for _ in range(2):
            # Only opening may fail outright; a second attempt finds a working disk.
            with contextlib.suppress(StorageFailedError):
                life.run(_OPERATIONS)
                break
        life.filesystem.restart(Crash.POWER)

        life.recover_and_go_on()


@pytest.mark.parametrize("seed", _SEEDS)
def test_refused_rows_stay_away_when_the_power_fails_right_after(seed: int) -> None:
    """Refuse a write, then crash while the log goes on: what was refused must not come back."""
    steps = _steps_of(seed)
    for step, (operation, name) in enumerate(steps):
        if operation != "write" or not name.endswith(".log"):
            continue
        for delay in (1, 2, 3, 4):
            life = _Life(seed)
            life.filesystem.errors = {step: errno.ENOSPC}
            life.filesystem.crash_step = step + delay
            with contextlib.suppress(SimulatedCrash):
                life.run(_OPERATIONS)
            life.filesystem.restart(Crash.POWER)

            life.recover_and_go_on()


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_machine_that_is_lost_leaves_acknowledged_rows_in_the_journal(seed: int) -> None:
    """Lose the disk at each step; another machine goes on, and the next after that."""
    for step in range(len(_steps_of(seed, _JournalledLife))):
        life = _JournalledLife(seed)
        life.filesystem.crash_step = step
        with pytest.raises(SimulatedCrash):
            life.run(_OPERATIONS)
        life.move()

        life.recover_and_go_on()
        life.move()
        life.recover_and_go_on()


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_place_where_the_journal_ends_has_acknowledged_rows(seed: int) -> None:
    """Lose the machine after each operation, also within a roll; another goes on, and the next."""
    whole = _JournalledLife(seed)
    whole.run(_OPERATIONS)
    for last in range(1, whole.journal.recorded_position + 1):
        life = _JournalledLife(seed)
        life.journal.last = last
        with pytest.raises(SimulatedCrash):
            life.run(_OPERATIONS)
        assert life.journal.stored_position == last
        life.move()

        life.recover_and_go_on()
        life.move()
        life.recover_and_go_on()


@pytest.mark.parametrize("seed", _SEEDS)
def test_what_a_disk_refuses_is_not_in_the_journal(seed: int) -> None:
    """Fail each step in turn; the log goes on or the process ends, and then the machine is lost."""
    for step, (operation, _) in enumerate(_steps_of(seed, _JournalledLife)):
        life = _JournalledLife(seed)
        code = errno.ENOSPC if operation in ("write", "create", "rename") else errno.EIO
        life.filesystem.errors = {step: code}
        for _ in range(2):
            with contextlib.suppress(StorageFailedError, SimulatedCrash):
                life.run(_OPERATIONS)
                break
            life.move()
        life.move()

        life.recover_and_go_on()
