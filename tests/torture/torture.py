"""Kill the service and its tiering worker again and again, and judge what is left. A program:

    python -m tests.torture.torture --minutes 60 [--seed N]

The run is made of eras: a fresh directory, some tables, writers of every kind, and a number of
lives of the service, each ended by kill -9: at a random instant, or when it reaches a named step
(`doomed_service.SERVICE_STEPS`). After each restart every table is judged against the history its
writers kept (checkers.py), first while interrupted calls still land, then again when all is quiet.
At the end of an era everything is tiered and the lake is judged too.

The seed decides what is killed when and what is written; threads and disks still add chance of
their own, so a seed repeats the plan of a run, not each of its interleavings.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.tiering.round import ROUND_STEPS
from tests.support.service_process import DiedAtStart, ServiceProcess
from tests.support.tier_once import tier_once
from tests.torture.checkers import KeyChecker, LogChecker, TransactionChecker, is_unreachable
from tests.torture.doomed_service import SERVICE_STEPS
from tests.torture.ledger import AppendLedger, KeyLedger
from tests.torture.writers import (
    KEY_SCHEMA,
    LOG_SCHEMA,
    Appender,
    Gate,
    ImpatientAppender,
    KeyWriter,
    TransactionWriter,
    Writer,
)

__all__ = ["Report", "torture"]

LIVES_PER_ERA: Final = 12
_BUCKETS: Final = 3
_DOOM_WAIT_S: Final = 4.0
_QUIET_WAIT_S: Final = 100.0
_SERVICE_LIMITS: Final = (
    *("--retention-interval-ms", "300"),
    *("--tiering-lease-ms", "2000"),
    *("--tiering-backoff-ms-min", "100"),
)
_SHORT_LOG: Final = {
    "table.log.ttl": "1s",
    "table.log.segment-bytes": "64kb",
    "table.datalake.freshness": "1s",
}
_NO_LAKE: Final = {"table.datalake.enabled": "false", "table.log.segment-bytes": "256kb"}


class _Checker(Protocol):
    table: str

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int: ...

    def check_lake(self, client: StreamhouseClient) -> None: ...

    def check_at_end(self, client: StreamhouseClient) -> None: ...


@dataclass
class Report:
    """What a run did."""

    seed: int
    eras: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    worker_deaths: int = 0
    rows_written: int = 0
    calls: int = 0
    rows_judged: int = 0
    cuts_judged: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        """Return the report for people."""
        at_steps = sum(n for step, n in self.kills.items() if step != "at random")
        return (
            f"seed {self.seed}: {self.eras} eras, {self.kills.total()} kills of the service"
            f" ({at_steps} at {len(self.kills.keys() - {'at random'})} named steps),"
            f" {self.worker_deaths} of the tiering worker, {self.calls:,} calls,"
            f" {self.rows_written:,} rows written, {self.rows_judged:,} judgements of rows,"
            f" {self.cuts_judged:,} cuts judged on the run, {self.seconds:,.0f} s, no violation"
        )


def torture(*, seed: int, seconds: float, lives_per_era: int = LIVES_PER_ERA) -> Report:
    """Run for at least `seconds`; raises AssertionError at the first violation, naming the seed."""
    report = Report(seed)
    started_s = time.monotonic()
    while not report.eras or time.monotonic() - started_s < seconds:
        era = random.Random(f"{seed}/{report.eras}")
        directory = Path(tempfile.mkdtemp(prefix="streamhouse-torture-"))
        try:
            _Era(directory, era, report).run(lives_per_era)
        except BaseException:
            sys.stderr.write(f"seed {seed}, era {report.eras}: {directory} is kept\n")
            raise
        shutil.rmtree(directory)
        report.eras += 1
        report.seconds = time.monotonic() - started_s
        sys.stderr.write(report.text() + "\n")
    return report


class _Era:
    """One data directory, from its first start to its last judgement."""

    def __init__(self, directory: Path, chance: random.Random, report: Report) -> None:
        self._directory = directory
        self._random = chance
        self._report = report
        self._port = _free_port()
        self._endpoint = f"http://127.0.0.1:{self._port}"
        self._gate = Gate()
        self._checkers: list[_Checker] = []
        self._writers: list[Writer] = []
        self._transactions: TransactionChecker | None = None
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self, lives: int) -> None:
        """Live, die, be judged; again and again."""
        try:
            with self._service():
                self._create_tables()
            for writer in self._writers:
                writer.start()
            for _ in range(lives):
                self._live_and_die()
            self._last_judgement()
        finally:
            self._gate.end()
            self._stop_worker()
            self._report.calls += sum(writer.calls for writer in self._writers)
            self._report.rows_written += sum(writer.rows for writer in self._writers)

    def _service(self, *doom: str) -> ServiceProcess:
        arguments = ("--port", str(self._port), *_SERVICE_LIMITS)
        if not doom:
            return ServiceProcess(self._directory, *arguments)
        command = (sys.executable, "-m", "tests.torture.doomed_service", *doom)
        return ServiceProcess(self._directory, *arguments, command=command)

    def _create_tables(self) -> None:
        with StreamhouseClient(self._endpoint) as client:
            for name, properties in (("log", _NO_LAKE), ("lake_log", _SHORT_LOG)):
                client.create_table(name, LOG_SCHEMA, bucket_count=_BUCKETS, properties=properties)
                ledger = AppendLedger()
                self._add(name, LogChecker(name, ledger), Appender, ledger, 2)
                self._add(name, None, ImpatientAppender, ledger, 1)
            for name, properties in (("keys", _NO_LAKE), ("lake_keys", _SHORT_LOG)):
                client.create_table(
                    name,
                    KEY_SCHEMA,
                    primary_key=["key"],
                    bucket_count=_BUCKETS,
                    properties=properties,
                )
                keys = KeyLedger()
                self._add(name, KeyChecker(name, keys), KeyWriter, keys, 2)
            client.create_table(
                "transactions", LOG_SCHEMA, bucket_count=_BUCKETS, properties=_SHORT_LOG
            )
            ledger = AppendLedger()
            self._transactions = TransactionChecker("transactions", ledger)
            self._add("transactions", self._transactions, TransactionWriter, ledger, 2)

    def _add(
        self,
        table: str,
        checker: _Checker | None,
        kind: type[Writer],
        ledger: AppendLedger | KeyLedger,
        count: int,
    ) -> None:
        if checker is not None:
            self._checkers.append(checker)
        for _ in range(count):
            number = len(self._writers)
            seed = self._random.getrandbits(32)
            common = {"endpoint": self._endpoint, "table": table, "number": number, "seed": seed}
            self._writers.append(kind(self._gate, ledger, **common))  # type: ignore[call-arg]

    def _live_and_die(self) -> None:
        is_doomed = self._random.random() < 0.7
        step = self._random.choice(sorted(SERVICE_STEPS)) if is_doomed else "at random"
        count = self._random.choice((1, 1, 2, 5, 20))
        try:
            self._live(step, str(count), is_doomed=is_doomed)
        except DiedAtStart:
            # It reached the step while it completed what an earlier life had left.
            assert is_doomed, "the service did not start"
            self._report.kills[step] += 1
        self._gate.close()
        with self._service():
            self._judge(is_quiet=False)
            assert self._gate.wait_until_empty(_QUIET_WAIT_S), "a call was never answered"
            self._raise_errors()
            self._judge(is_quiet=True)

    def _live(self, step: str, count: str, *, is_doomed: bool) -> None:
        with self._service(*((step, count) if is_doomed else ())) as service:
            self._keep_worker()
            self._gate.open()
            if is_doomed:
                self._judge_cuts_until(service.has_ended, _DOOM_WAIT_S)
            else:
                self._judge_cuts_until(lambda: False, self._random.uniform(0.05, 2.0))
            self._report.kills[step if service.has_ended() else "at random"] += 1
            service.kill()

    def _judge(self, *, is_quiet: bool) -> None:
        with StreamhouseClient(self._endpoint) as client:
            for checker in self._checkers:
                self._report.rows_judged += checker.check(client, is_quiet=is_quiet)

    def _judge_cuts_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """While the service lives: every cut of the transactions' table holds whole ones only."""
        assert self._transactions is not None
        deadline_s = time.monotonic() + seconds
        pause = threading.Event()
        with StreamhouseClient(self._endpoint, timeout_s=0.1) as client:
            while not is_over() and time.monotonic() < deadline_s:
                try:
                    self._transactions.check_cut(client)
                    self._report.cuts_judged += 1
                except StreamhouseError as error:
                    if not is_unreachable(error):
                        raise
                pause.wait(0.02)

    def _last_judgement(self) -> None:
        with self._service(), StreamhouseClient(self._endpoint) as client:
            self._stop_worker()
            tier_once(client)
            for checker in self._checkers:
                checker.check_at_end(client)
                if client.describe_table(checker.table).properties().datalake_enabled:
                    checker.check_lake(client)

    def _raise_errors(self) -> None:
        for writer in self._writers:
            if writer.error is not None:
                raise AssertionError(f"{writer.name} failed") from writer.error

    def _keep_worker(self) -> None:
        """See that a tiering worker runs; most of them are doomed too."""
        if self._worker is not None and self._worker.poll() is None:
            return
        if self._worker is not None:
            self._report.worker_deaths += 1
        step = self._random.choice((*ROUND_STEPS, *ROUND_STEPS, "never"))
        count = str(self._random.choice((1, 3, 10)))
        command = ("-m", "tests.torture.tiering_worker", self._endpoint, step, count)
        log = (self._directory / "worker.log").open("ab")
        with log:
            self._worker = subprocess.Popen(
                (sys.executable, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Torture the service; see this module's text.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    sys.stderr.write(f"seed {seed}\n")
    report = torture(seed=seed, seconds=given.minutes * 60)
    sys.stdout.write(report.text() + "\n")
    for step, count in sorted(report.kills.items()):
        sys.stdout.write(f"  killed {step}: {count}\n")


if __name__ == "__main__":
    main()
