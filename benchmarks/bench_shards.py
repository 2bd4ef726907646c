"""Two shards on two cores beside one shard on one: calls a second, and processor time a call.

Each shard shares its core with the one load generator that writes to it, so two shards have twice
what one has. Both are measured in turns. Rows are acknowledged by the disk: what a store costs is
measured elsewhere.

Then tables move between the two while somebody writes to them: how long a write waits, beside the
whole move, of which the most is copying while the table is open.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness import SCHEMA, make_rows, median, process_cpu_seconds, report
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

ROWS_A_CALL: Final = 100
TURNS: Final = 5
SECONDS: Final = 3.0
MOVES: Final = 6
MOVED_ROWS: Final = 400_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn came to."""

    calls_a_second: float
    cpu_us_a_call: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A running service; `pids` are its shards' processes, `tables` one table in each."""

    endpoint: str
    pids: Sequence[int]
    tables: Sequence[str]

    def turn(self) -> Turn:
        """Let one load generator a shard write, each on the core of its shard."""
        for core, pid in enumerate(self.pids):
            _pin(pid, core)
        before_s = [process_cpu_seconds(pid) for pid in self.pids]
        command = [sys.executable, "-m", "benchmarks.bench_shards", "--load", self.endpoint]
        loads = [
            subprocess.Popen(
                [*command, table, str(core)], stdout=subprocess.PIPE, env=dict(os.environ)
            )
            for core, table in enumerate(self.tables)
        ]
        answers = [load.communicate(timeout=60)[0].split() for load in loads]
        spent_s = sum(map(process_cpu_seconds, self.pids)) - sum(before_s)
        calls = sum(int(count) for count, _ in answers)
        return Turn(
            calls_a_second=sum(int(count) / float(seconds) for count, seconds in answers),
            cpu_us_a_call=1e6 * spent_s / calls,
        )


def _pin(pid: int, core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {cores[core % len(cores)]})


def _load(endpoint: str, table: str, core: int) -> None:
    """Write for a while from one core; print how many calls that were in how many seconds."""
    _pin(os.getpid(), core)
    rows = make_rows(ROWS_A_CALL)
    with StorageClient(endpoint) as client:
        for _ in range(20):
            client.append(table, rows)
        calls, started_s = 0, time.perf_counter()
        while time.perf_counter() - started_s < SECONDS:
            client.append(table, rows)
            calls += 1
        print(calls, time.perf_counter() - started_s)


@contextlib.contextmanager
def _service(directory: Path, count: int) -> Iterator[Contender]:
    journal = ("--journal", f"file://{directory / 'store'}", "--journal-ack", "disk")
    with ServiceProcess(directory / "data", "--shards", str(count), *journal) as service:
        with StorageClient(service.endpoint) as client:
            for number in range(count):
                client.create_table(f"t{number}", SCHEMA)
            shards = client.shards()
        assert [shard["table_count"] for shard in shards] == [1] * count, shards
        # A table's shard is where its requests end up; which is which does not matter here.
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text()
        yield Contender(
            endpoint=service.endpoint,
            pids=[int(pid) for pid in children.split()],
            tables=_in_order_of([shard["endpoint"] for shard in shards]),
        )


def _in_order_of(endpoints: Sequence[str]) -> list[str]:
    """Return the tables in the order of their shards."""
    with StorageClient(endpoints[0]) as client:
        status = client.status()
    tables = {table["shard"]: table["table"] for table in status["tables"]}
    return [tables[str(number)] for number in range(len(endpoints))]


@dataclass(frozen=True, slots=True)
class Moved:
    """One move: the longest that a write of a row took meanwhile, and the whole of it."""

    closed_ms: float
    move_ms: float
    cpu_ms: float


def _moves(service: Contender, *, is_keyed: bool) -> list[Moved]:
    """Move a table there and back while somebody writes a row after the other."""
    key = ["id"] if is_keyed else []
    with StorageClient(service.endpoint) as client, StorageClient(service.endpoint) as writer:
        table = "moved_keys" if is_keyed else "moved"
        client.create_table(table, SCHEMA, primary_key=key)
        write = writer.upsert if is_keyed else writer.append
        for _ in range(4):
            write(table, make_rows(MOVED_ROWS // 4))
        status = client.status()["tables"]
        home = next(t["shard"] for t in status if t["table"] == f"default.{table}")
        return [
            _move(service, client, table, write, to=str((int(home) + number + 1) % 2))
            for number in range(MOVES)
        ]


def _move(
    service: Contender,
    client: StorageClient,
    table: str,
    write: Callable[..., object],
    *,
    to: str,
) -> Moved:
    row, longest_s, is_over = make_rows(1), 0.0, threading.Event()

    def go_on() -> None:
        nonlocal longest_s
        while not is_over.is_set():
            begun_s = time.perf_counter()
            write(table, row)
            longest_s = max(longest_s, time.perf_counter() - begun_s)

    writing = threading.Thread(target=go_on)
    before_s, begun_s = sum(map(process_cpu_seconds, service.pids)), time.perf_counter()
    writing.start()
    client.move_table(table, to)
    move_s = time.perf_counter() - begun_s
    is_over.set()
    writing.join()
    cpu_s = sum(map(process_cpu_seconds, service.pids)) - before_s
    return Moved(longest_s * 1e3, move_s * 1e3, cpu_s * 1e3)


def _report_moves(service: Contender) -> None:
    for kind, is_keyed in (("log", False), ("primary key", True)):
        moves = _moves(service, is_keyed=is_keyed)
        closed_ms, move_ms, cpu_ms = (
            median([getattr(move, name) for move in moves])
            for name in ("closed_ms", "move_ms", "cpu_ms")
        )
        report(
            f"A {kind} table of {MOVED_ROWS:,} rows moves: the longest that a write waits",
            measured=f"{closed_ms:,.0f} ms",
            limit=f"{move_ms:,.0f} ms of the whole move, {cpu_ms:,.0f} ms of processor",
            ratio=closed_ms / move_ms,
            bar="reported",
            reached=None,
        )


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        one = stack.enter_context(_service(Path(name) / "one", 1))
        two = stack.enter_context(_service(Path(name) / "two", 2))
        turns = [(one.turn(), two.turn()) for _ in range(TURNS)]
        _report_moves(two)
    calls = [median([turn[which].calls_a_second for turn in turns]) for which in (0, 1)]
    cpu_us = [median([turn[which].cpu_us_a_call for turn in turns]) for which in (0, 1)]
    report(
        f"Two shards on two cores: appends of {ROWS_A_CALL} rows, all writers together",
        measured=f"{calls[1]:,.0f} calls/s",
        limit=f"{calls[0]:,.0f} calls/s by one shard on one core",
        ratio=calls[1] / calls[0],
        bar="reported",
        reached=None,
    )
    report(
        "Two shards on two cores: processor time of the service a call",
        measured=f"{cpu_us[1]:,.0f} µs",
        limit=f"{cpu_us[0]:,.0f} µs by one shard on one core",
        ratio=cpu_us[1] / cpu_us[0],
        bar="at most 1.1",
        reached=cpu_us[1] <= 1.1 * cpu_us[0],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", nargs=3, metavar=("ENDPOINT", "TABLE", "CORE"))
    asked = parser.parse_args().load
    if asked is None:
        main()
    else:
        _load(asked[0], asked[1], int(asked[2]))
