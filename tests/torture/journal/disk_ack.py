"""An era with `--journal-ack disk`: a lost disk takes at most what the journal was behind by.

One machine, one log table. The disk is lost again and again; what is there after each restart is
judged: the log is what it was, up to an end; the rows that are lost were acknowledged within
`--journal-lag-max-ms`, the first to the last of them; and a reader that had read beyond the end is
told so, and never given other rows under offsets it has seen.
"""

from __future__ import annotations

import abc
import random
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.faulty_store import CALM, FaultPlan
from tests.support.journal_machines import JournalHome, Machine
from tests.torture.era import SERVICE_LIMITS, Report

__all__ = ["DiskAckEra"]

_TABLE: Final = "behind"
_SCHEMA: Final = pa.schema([pa.field("number", pa.int64(), nullable=False)])
_PROPERTIES: Final = {"table.datalake.enabled": "false", "table.log.segment-bytes": "64kb"}
_LAG_MS: Final = 500
_WRITERS: Final = 3
_TIMEOUT_S: Final = 5.0
_PATIENCE_S: Final = 60.0
# The journal looks at how far behind it is at moments of its own.
_SLACK_S: Final = 0.25
_OWNER_TIMEOUT_S: Final = 120.0
_PLANS: Final = (CALM, CALM, FaultPlan(share=0.1, delay_ms_max=100))


class DiskAckEra:
    """See the module."""

    def __init__(
        self, directory: Path, chance: random.Random, report: Report, home: JournalHome
    ) -> None:
        self._random = chance
        self._report = report
        self._home = home
        self._machine = Machine(
            home,
            "one",
            *SERVICE_LIMITS,
            *("--journal-ack", "disk", "--journal-lag-max-ms", str(_LAG_MS)),
            *("--lease-ms", "1000"),
        )
        self._known: dict[int, _Known] = {}
        self._lives = 0

    def run(self, lives: int) -> None:
        """Write, lose the disk, judge; again and again."""
        try:
            self._start()
            with StreamhouseClient(self._machine.endpoint) as client:
                client.create_table(_TABLE, _SCHEMA, bucket_count=1, properties=_PROPERTIES)
            for _ in range(lives):
                self._live_and_die()
        finally:
            self._machine.kill()

    def _start(self) -> None:
        self._machine.start()
        self._machine.wait_until_owner(_OWNER_TIMEOUT_S)

    def _live_and_die(self) -> None:
        self._lives += 1
        first = self._lives * 1_000_000
        endpoint, is_over = self._machine.endpoint, threading.Event()
        writers = [_Writer(endpoint, is_over, first + n * 200_000) for n in range(_WRITERS)]
        reader = _Reader(endpoint)
        threads: list[_User] = [*writers, reader]
        for thread in threads:
            thread.start()
        self._wait_with_faults()
        is_kept = self._random.random() < 0.3
        (self._machine.kill if is_kept else self._machine.lose)()
        is_over.set()
        for writer in writers:
            writer.join()
            self._report.calls += len(writer.acknowledged)
            self._known.update(writer.acknowledged)
        self._report.deaths["killed, ack disk" if is_kept else "disk lost, ack disk"] += 1
        self._report.disks_lost += not is_kept
        self._calm_store()
        self._start()
        with StreamhouseClient(endpoint) as client:
            self._judge(client, reader, may_lose=not is_kept)
        for thread in threads:
            if thread.error is not None:
                raise AssertionError(f"{thread.name} failed") from thread.error

    def _wait_with_faults(self) -> None:
        pause = threading.Event()
        faulty = self._home.faulty
        if faulty is not None:
            faulty.plan = self._random.choice(_PLANS)
        pause.wait(self._random.uniform(0.1, 3.0))
        if faulty is not None and self._random.random() < 0.3:
            faulty.go_away(self._random.choice((0.2, 2.0)))
            pause.wait(self._random.uniform(0.1, 2.5))

    def _calm_store(self) -> None:
        if self._home.faulty is not None:
            self._report.store_faults.update(self._home.faulty.calm())

    def _judge(self, client: StreamhouseClient, reader: _Reader, *, may_lose: bool) -> None:
        end = client.positions(_TABLE)[0].high_watermark
        # More rows than were lost: from now on new ones could be taken for those.
        _append(client, range(-1, -2 - max(0, reader.end - end), -1))
        rows = client.read(_TABLE).column("number").to_pylist()
        reader.wait_until_told_or_at(len(rows))
        for offset, known in self._known.items():
            assert offset >= end or rows[offset] == known.number, (
                f"offset {offset} has {rows[offset]}, but had {known.number} before"
            )
        lost = [known for offset, known in self._known.items() if offset >= end]
        assert may_lose or not lost, f"{len(lost)} rows are lost, but the disk is not"
        if lost:
            window_s = max(one.asked_s for one in lost) - min(one.told_s for one in lost)
            assert window_s <= _LAG_MS / 1_000 + _SLACK_S, (
                f"{len(lost)} rows are lost that were acknowledged within {window_s:.3f} s"
            )
        seen = reader.seen if reader.was_told is None else reader.seen[:end]
        assert seen == rows[: len(seen)], (
            f"a reader was given other rows than there are, and was told {reader.was_told}"
        )
        # They came from the journal, but for those just appended, which may be lost again.
        self._known = {offset: _Known(number, 0.0, 0.0) for offset, number in enumerate(rows[:end])}
        self._report.rows_judged += len(rows)
        self._report.rows_written += len(rows)


class _Known(NamedTuple):
    """A row that was acknowledged, between `asked_s` and `told_s`."""

    number: int
    asked_s: float
    told_s: float


class _User(threading.Thread, abc.ABC):
    """A thread whose `error` is what ended it, None while all is well."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.use()
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self.error = error

    @abc.abstractmethod
    def use(self) -> None:
        """Do it until it is over."""


class _Writer(_User):
    """Appends a row a call, until it is over, or the service is gone."""

    def __init__(self, endpoint: str, is_over: threading.Event, first: int) -> None:
        super().__init__(endpoint)
        self._is_over = is_over
        self._first = first
        # By offset.
        self.acknowledged: dict[int, _Known] = {}

    def use(self) -> None:
        number = self._first
        with StreamhouseClient(self.endpoint, timeout_s=_TIMEOUT_S) as client:
            while not self._is_over.is_set():
                asked_s = time.monotonic()
                try:
                    places = client.append(_TABLE, _rows([number]))
                except StreamhouseError:
                    # One of them may be there or not; the next number is another's.
                    number += 1
                    continue
                ((offset, _),) = places.values()
                self.acknowledged[offset] = _Known(number, asked_s, time.monotonic())
                number += 1


class _Reader(_User):
    """Follows the table from its start, until it is told that it cannot go on."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.seen: list[int] = []
        self.was_told: StreamhouseError | None = None
        self._goal: int | None = None
        self._changed = threading.Condition()

    @property
    def end(self) -> int:
        """How far it has read."""
        return len(self.seen)

    def use(self) -> None:
        with StreamhouseClient(self.endpoint, timeout_s=_PATIENCE_S) as client:
            try:
                for batch in client.subscribe(_TABLE, start={0: 0}):
                    assert batch.base_offset == len(self.seen), "a subscription has a gap"
                    with self._changed:
                        self.seen += batch.data.column("number").to_pylist()
                        self._changed.notify_all()
                        if self._goal is not None and len(self.seen) >= self._goal:
                            return
            except StreamhouseError as error:
                with self._changed:
                    self.was_told = error
                    self._changed.notify_all()

    def wait_until_told_or_at(self, end: int) -> None:
        """Wait until it has read so far, or has been told that it cannot."""
        with self._changed:
            self._goal = end
            arrived = self._changed.wait_for(
                lambda: self.was_told is not None or self.error is not None or self.end >= end,
                _PATIENCE_S,
            )
        assert arrived, f"a reader is at {self.end}, not at {end}, and was told nothing"


def _append(client: StreamhouseClient, numbers: range) -> None:
    client.append(_TABLE, _rows(list(numbers)))


def _rows(numbers: list[int]) -> pa.Table:
    return pa.table({"number": numbers}, schema=_SCHEMA)
