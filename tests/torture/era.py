"""One era of the torture test: a fresh directory, lives and deaths of the service, judgements.

`Era` is of one machine that keeps its disk; those of journal/ lose theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.tiering.round._round import BATCH_STEPS, HISTORY_STEPS, ROUND_STEPS
from tests.support.command_line import streamhouse
from tests.support.free_ports import free_port
from tests.support.service_process import DiedAtStart, ServiceProcess
from tests.support.tier_once import tier_once
from tests.torture.aging import AgingChecker
from tests.torture.aging_keys import AgingKeyChecker
from tests.torture.checkers import KeyChecker, LogChecker, is_unreachable
from tests.torture.deaths import Death, choose_death
from tests.torture.follower import Follower
from tests.torture.held_positions import PositionHolder
from tests.torture.key_writers import KeyTransactionWriter
from tests.torture.ledger import KeyLedger
from tests.torture.live import LiveChecker
from tests.torture.outside import Engine
from tests.torture.tables import BUCKETS, Checker, CutChecker, create_tables, places
from tests.torture.writers import PATIENCE_S, Gate, TransactionWriter, Writer

__all__ = ["SERVICE_LIMITS", "Era", "Report"]

_QUIET_WAIT_S: Final = 100.0
# An hour on a shared machine meets minutes of load; how fast a start is has a benchmark.
_START_TIMEOUT_S: Final = 180.0
SERVICE_LIMITS: Final = (
    *("--retention-interval-ms", "300"),
    *("--tiering-lease-ms", "2000"),
    *("--tiering-backoff-ms-min", "100"),
)
_MAINTENANCE_STEPS: Final = (
    *("rewrite-planned", "files-rewritten", "rewrite-staged", "rewrite-committed"),
    *("snapshots-expired", "files-found", "orphans-removed"),
    *("expiry-registered", "removal-staged", "removal-committed"),
)
_WORKER_STEPS: Final = (*ROUND_STEPS, *HISTORY_STEPS, *BATCH_STEPS, *_MAINTENANCE_STEPS)
_WORKERS: Final = 2


# A worker has to start, and a round to be due.
_STEP_WAIT_S: Final = 20.0


@dataclass
class Report:
    """What a run did."""

    seed: int
    eras: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    worker_deaths: Counter[str] = field(default_factory=Counter)
    rows_aged: int = 0
    rows_written: int = 0
    calls: int = 0
    rows_judged: int = 0
    cuts_judged: int = 0
    disks_lost: int = 0
    tables_moved: int = 0
    store_faults: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    positions: Counter[str] = field(default_factory=Counter)
    standby_answers: Counter[str] = field(default_factory=Counter)
    takeovers_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def text(self) -> str:
        """Return the report for people."""
        return (
            f"seed {self.seed}: {self.eras} eras, {self.deaths.total()} deaths of the service of"
            f" {len(self.deaths)} kinds, {self.worker_deaths.total()} of tiering workers,"
            f" {self.checks} directories checked, {self.calls:,} calls,"
            f" {self.rows_written:,} rows written, {self.rows_aged:,} gone of old age,"
            f" {self.rows_judged:,} judgements of rows, {self.cuts_judged:,} cuts judged on the"
            f" run, {self.disks_lost} disks lost, {len(self.takeovers_s)} takeovers,"
            f" {self.tables_moved} tables moved,"
            f" {self.store_faults.total()} faults of the store,"
            f" {self.outside.total()} commits of other engines,"
            f" {self.positions.total()} refusals of positions in dropped tables,"
            f" {self.standby_answers.total():,} reads answered by standbys,"
            f" {self.seconds:,.0f} s, no violation"
        )


class Era:
    """One data directory, from its first start to its last judgement."""

    def __init__(
        self,
        directory: Path,
        chance: random.Random,
        report: Report,
        *,
        endpoint: str | None = None,
    ) -> None:
        self._directory = directory
        self._random = chance
        self._report = report
        self._port = free_port()
        self._endpoint = endpoint or f"http://127.0.0.1:{self._port}"
        # For a client that does not wait for a service that is not there.
        self._endpoint_now = self._endpoint
        self._gate = Gate()
        self._checkers: list[Checker] = []
        self._writers: list[Writer] = []
        self._followers: list[tuple[Follower, Callable[[], dict[int, int]]]] = []
        self._workers: list[tuple[str, subprocess.Popen[bytes]] | None] = [None] * _WORKERS

    def run(self, lives: int) -> None:
        """Live, die, be judged; again and again."""
        try:
            with self._service(None):
                self._prepare()
            for writer in self._writers:
                writer.start()
            for _ in range(lives):
                self._live_and_die()
            self._last_judgement()
            self._check_directory("--lake-rows")
        finally:
            self._gate.end()
            for follower, _ in self._followers:
                follower.end()
            self._stop_workers()
            self._report.calls += sum(writer.calls for writer in self._writers)
            self._report.rows_written += sum(writer.rows for writer in self._writers)
            for writer in self._writers:
                self._report.outside += writer.done if isinstance(writer, Engine) else Counter()
                if isinstance(writer, PositionHolder):
                    self._report.positions += writer.done

    def _service(
        self, command: tuple[str, ...] | None
    ) -> contextlib.AbstractContextManager[ServiceProcess]:
        arguments = ("--port", str(self._port), *SERVICE_LIMITS)
        if command is None:
            return ServiceProcess(self._directory, *arguments, start_timeout_s=_START_TIMEOUT_S)
        return ServiceProcess(
            self._directory, *arguments, command=command, start_timeout_s=_START_TIMEOUT_S
        )

    def _prepare(self) -> None:
        with StreamhouseClient(self._endpoint) as client:
            create_tables(client)
        for place in places():
            if place.checker is not None:
                self._checkers.append(place.checker)
                self._follow(place.checker)
            for _ in range(place.count):
                self._writers.append(
                    place.writer(
                        self._gate,
                        place.ledger,  # type: ignore[call-arg]
                        endpoint=self._endpoint,
                        table=place.table,
                        number=len(self._writers),
                        seed=self._random.getrandbits(32),
                    )
                )

    def _follow(self, checker: Checker) -> None:
        """Follow the tables that keep their whole log."""
        is_followed = checker.table in ("log", "keys", "sums", "key_transactions")
        if not is_followed or isinstance(checker, LiveChecker):
            return
        if isinstance(checker, LogChecker):
            image, judge = checker.image, None
            ends: Callable[[], dict[int, int]] = lambda: {  # noqa: E731 - a closure a checker
                bucket: len(rows) for bucket, rows in image.buckets.items()
            }
        else:
            assert isinstance(checker, KeyChecker)
            # Every change must fit the one before it here too.
            judge, ends = KeyChecker(checker.table, KeyLedger()), lambda: checker.read_to
        follower = Follower(
            self._endpoint,
            checker.table,
            (lambda *_: None) if judge is None else judge.fold_batch,
            buckets=BUCKETS,
            patience_s=PATIENCE_S,
        )
        self._followers.append((follower, ends))
        follower.start()

    def _live_and_die(self) -> None:
        """Live, die in some way, and be judged after the next start."""
        death = choose_death(self._random)
        try:
            self._live(death)
        except DiedAtStart:
            # It reached the step while it completed what an earlier life had left.
            assert death.by_itself, "the service did not start"
            self._report.deaths[death.kind] += 1
        self._gate.close()
        if self._random.random() < 0.2:
            self._check_directory()
        self._befall_disk()
        with self._service(None):
            self._judge_all()

    def _check_directory(self, *arguments: str) -> None:
        """Check what a dead service has left."""
        streamhouse("check", "--data-dir", self._data_dir(), *arguments)
        self._report.checks += 1

    def _data_dir(self) -> Path:
        return self._directory

    def _befall_disk(self) -> None:
        """Do to the disk of a dead service what this era does; this one leaves it alone."""

    def _live(self, death: Death) -> None:
        with self._service(death.command) as service:
            self._keep_workers()
            self._gate.open()
            is_over = service.has_ended if death.by_itself else lambda: False
            self._judge_cuts_until(is_over, death.seconds)
            if death.is_clean:
                assert service.terminate() == 0, "a clean stop under load failed"
            elif death.command and not death.by_itself and death.goes_on:
                # The disk is well again: no restart is needed.
                self._gate.close()
                self._judge_all()
            has_ended = service.has_ended()
            is_late = death.by_itself and not has_ended
            self._report.deaths["kill at random" if is_late else death.kind] += 1
            service.kill()

    def _judge_all(self) -> None:
        """Judge while interrupted calls still land, and when all is quiet."""
        self._judge(is_quiet=False)
        assert self._gate.wait_until_empty(_QUIET_WAIT_S), (
            f"calls were never answered: {[w.name for w in self._writers if w.is_inside]}"
        )
        self._raise_errors()
        self._judge(is_quiet=True)

    def _judging_client(self) -> StreamhouseClient:
        return StreamhouseClient(self._endpoint)

    def _judge(self, *, is_quiet: bool) -> None:
        with self._judging_client() as client:
            for checker in self._checkers:
                self._report.rows_judged += checker.check(client, is_quiet=is_quiet)

    def _judge_cuts_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """While the service lives: every cut of the transactions' tables has whole ones only."""
        cuts = [c for c in self._checkers if isinstance(c, CutChecker)]
        deadline_s = time.monotonic() + seconds
        pause = threading.Event()
        with StreamhouseClient(self._endpoint_now, timeout_s=0.5) as client:
            for checker in itertools.cycle(cuts):
                if is_over() or time.monotonic() >= deadline_s:
                    break
                try:
                    checker.check_cut(client)
                    self._report.cuts_judged += 1
                except StreamhouseError as error:
                    if not is_unreachable(error):
                        raise
                pause.wait(0.005)

    def _last_judgement(self) -> None:
        with self._service(None), StreamhouseClient(self._endpoint) as client:
            self._stop_workers()
            tier_once(client)
            for checker in self._checkers:
                checker.check_at_end(client)
                if client.describe_table(checker.table).properties().datalake_enabled:
                    checker.check_lake(client)
                if isinstance(checker, (AgingChecker, AgingKeyChecker)):
                    self._report.rows_aged += checker.rows_aged
            for follower, ends in self._followers:
                follower.wait_for(ends(), _QUIET_WAIT_S)

    def _raise_errors(self) -> None:
        for writer in self._writers:
            if writer.error is not None:
                raise AssertionError(f"{writer.name} failed") from writer.error

    def _keep_workers(self) -> None:
        """See that tiering workers run, all for all tables; most of them are doomed too."""
        for place, worker in enumerate(self._workers):
            if worker is not None and worker[1].poll() is None:
                continue
            if worker is not None:
                self._report.worker_deaths[worker[0]] += 1
            step = self._random.choice((*_WORKER_STEPS, *_WORKER_STEPS, "never"))
            self._start_worker(place, step, str(self._random.choice((1, 3, 10))))

    def _start_worker(self, place: int, step: str, *how: str) -> subprocess.Popen[bytes]:
        command = ("-m", "tests.torture.tiering_worker", self._endpoint, step, *how)
        with (self._directory / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                (sys.executable, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._workers[place] = step, process
        return process

    @contextlib.contextmanager
    def _round_under_way(self) -> Iterator[str]:
        """Hold a worker in the middle of a round; yields the step, "" if it came to none."""
        self._stop_workers()
        step = self._random.choice((*ROUND_STEPS, *BATCH_STEPS, *HISTORY_STEPS))
        worker = self._start_worker(0, step, "1", "SIGSTOP")
        deadline_s = time.monotonic() + _STEP_WAIT_S
        pause = threading.Event()
        while not is_stopped(worker.pid) and time.monotonic() < deadline_s:
            pause.wait(0.05)
        try:
            yield step if is_stopped(worker.pid) else ""
        finally:
            worker.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _transactions_under_way(self) -> Iterator[None]:
        """Hold writers between what they staged and their commits, as far as that comes soon."""
        holds = [
            w.hold for w in self._writers if isinstance(w, TransactionWriter | KeyTransactionWriter)
        ]
        for hold in holds:
            hold.begin()
        deadline_s = time.monotonic() + _STEP_WAIT_S
        try:
            for hold in holds:
                hold.wait(deadline_s - time.monotonic())
            yield
        finally:
            for hold in holds:
                hold.end()

    def _stop_workers(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker is not None:
                worker[1].kill()
                worker[1].wait()
            self._workers[place] = None


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not yet woken."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
