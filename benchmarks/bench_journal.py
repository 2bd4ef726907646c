"""Appends and upserts with a journal against none, and what a takeover by a standby takes.

Services without a journal, with ack `disk` and with ack `journal` are measured in turns, over a
directory and over S3 (SeaweedFS on the same two cores). A lone append stands beside the store's own
PUT of as many bytes: one after the other, as the bar has it, and each after an append to the
service without a journal. The store has slept then, as it has when a journal's object comes, and
takes nearly twice the processor time for the same PUT. A takeover begins when the owner is killed
and its directory deleted, and ends with the first write that is acknowledged.

A journal costs processor time in three places: the service, the store, and, where that is a file
system, the kernel. All share the machine's cores with the clients here, as they would not in
earnest. So beside the bar stands the *ceiling*: the rate at which all cores would be busy if the
service did nothing more for a journal than without one, and the store did what it did, but not more
than the store takes of the same bytes when nobody else asks anything of the machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from benchmarks.harness import SCHEMA, changing_calls, make_rows, median, report
from benchmarks.turns import Contender, Tally, calling, take_turns
from streamhouse.client import StorageClient
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store
from tests.support.journal_machines import JournalHome, Machine, Pair, StoreKind
from tests.support.service_process import ServiceProcess

BATCH_ROWS = 2_000
SMALL_ROWS = 100
LEASE_MS = 2_000
_ACKS: Final = ("disk", "journal")
_BARS: Final = {"disk": 0.9, "journal": 0.75}
_PATIENCE_S: Final = 60.0
_NO_LAKE: Final = {"table.datalake.enabled": "false"}
# What an object of the journal has of calls, about, where many write; how many are sent at once.
_CALLS_AN_OBJECT: Final = 8
_PUTS_AT_ONCE: Final = 4
_CALLS_A_WRITER: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    writers: tuple[int, ...] = (8, 32)
    turns: int = 6
    turn_s: float = 2.0
    takeovers: int = 5
    keys: int = 200_000


_TINY: Final = Sizes(writers=(2,), turns=1, turn_s=0.2, takeovers=1, keys=500)


def main() -> None:
    """Report rows/s, the latency of one append, and takeovers, on a directory and on S3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="try whether it runs; figures are void")
    parser.add_argument("--stores", nargs="*", choices=("file", "s3"), default=("file", "s3"))
    arguments = parser.parse_args()
    sizes = _TINY if arguments.tiny else Sizes()
    for store in arguments.stores:
        _report_appends(store, sizes)
    # A store that outlives machines: S3, if it is among them.
    _report_takeovers(max(arguments.stores), sizes)


def _report_appends(store: StoreKind, sizes: Sizes) -> None:
    with (
        JournalHome(store) as home,
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as plain,
    ):
        homes = {ack: home.sibling(f"ack-{ack}") for ack in _ACKS}
        machines = {ack: Machine(homes[ack], f"ack-{ack}", "--journal-ack", ack) for ack in _ACKS}
        try:
            for machine in machines.values():
                machine.start()
                machine.wait_until_owner(_PATIENCE_S)
            services = {"none": (plain.endpoint, plain.pid)} | {
                ack: (machine.endpoint, _pid(machine)) for ack, machine in machines.items()
            }
            for writers in sizes.writers:
                _report_rates(home, services, writers, sizes)
            _report_upserts(home, services, sizes)
            _report_latency(home, services, sizes)
        finally:
            for machine in machines.values():
                machine.end()


def _pid(machine: Machine) -> int:
    assert machine.process is not None
    return machine.process.pid


# -- throughput ---------------------------------------------------------------------------------


def _report_rates(
    home: JournalHome, services: dict[str, tuple[str, int]], writers: int, sizes: Sizes
) -> None:
    rows = make_rows(BATCH_ROWS)
    store_pid = None if home.store is None else home.store.pid
    contenders = {
        name: Contender(
            run=_writers(endpoint, rows, writers),
            pid=pid,
            store_pid=None if name == "none" else store_pid,
        )
        for name, (endpoint, pid) in services.items()
    }
    object_bytes = _CALLS_AN_OBJECT * rows.serialize().size
    contenders["store"] = Contender(run=_puts(home, object_bytes))
    if store_pid is None:
        # The store is the kernel, in the service's own time: what it takes is measured beside.
        contenders["file"] = Contender(run=calling(partial(_write, home.folder, object_bytes)))
    tallies = take_turns(contenders, turns=sizes.turns, seconds=sizes.turn_s)
    none = tallies["none"]
    for ack in _ACKS:
        ratio = tallies[ack].rate / none.rate
        name = f"append, {BATCH_ROWS:,}-row batches, {writers} connections, ack {ack}, {home.kind}"
        report(
            name,
            measured=_rate(tallies[ack]),
            limit=f"no journal: {_rate(none)}",
            ratio=ratio,
            bar=f"at least {_BARS[ack]}",
            reached=ratio >= _BARS[ack],
        )
        file = tallies.get("file")
        store_ms = tallies[ack].store_ms if file is None else file.client_ms / _CALLS_AN_OBJECT
        alone = tallies["store"].rate * _CALLS_AN_OBJECT
        ceiling = min(_ceiling(none, store_ms), alone / none.rate)
        report(
            f"{name}, of what {_cores()} cores allow",
            measured=f"{ratio:.2f} of no journal",
            limit=f"{ceiling:.2f}, where service and client take what they take without a journal"
            f" and the store {store_ms:.2f} ms a call; the store alone takes"
            f" {alone * BATCH_ROWS / 1e3:,.0f} k rows/s",
            ratio=ratio / ceiling,
            bar="1 is the least work there is",
            reached=None,
        )


def _ceiling(none: Tally, store_ms: float) -> float:
    """Return which part of the rate without a journal all cores together could have with one."""
    busy_ms = none.service_ms + none.client_ms + store_ms
    return min(1.0, _cores() / busy_ms * 1e3 / none.rate)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _puts(home: JournalHome, size_bytes: int) -> Callable[[float], list[float]]:
    """Return a run of objects that are stored as a journal's are, several at once."""
    objects = open_store(home.url, properties=home.properties)
    data, numbers = os.urandom(size_bytes), itertools.count()
    folder = f"bench-{os.urandom(4).hex()}"

    def put() -> None:
        objects.create(f"{folder}/{next(numbers):012d}", [data])

    return partial(_in_parallel, [calling(put)] * _PUTS_AT_ONCE)


def _write(folder: Path, size_bytes: int) -> None:
    """Store an object as a file: the least that it takes to be whole or not there.

    Its bytes are synced before it has its name, and the name before anybody is told of it.
    """
    written, named = folder / "written", folder / "named"
    with written.open("wb", buffering=0) as file:
        file.write(bytes(size_bytes))
        os.fsync(file.fileno())
    named.hardlink_to(written)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    written.unlink()
    named.unlink()


def _rate(tally: Tally) -> str:
    return f"{tally.rate * BATCH_ROWS / 1e3:,.0f} k rows/s ({tally.processor})"


def _writers(endpoint: str, rows: pa.RecordBatch, writers: int) -> Callable[[float], list[float]]:
    """Return a run of writers in parallel, each with a connection of its own."""
    path = f"default.appended_{writers}"
    with StorageClient(endpoint) as client:
        client.create_table(path, SCHEMA, bucket_count=4, properties=_NO_LAKE)
    clients = [StorageClient(endpoint) for _ in range(writers)]
    return partial(_in_parallel, [calling(partial(_append, c, path, rows)) for c in clients])


def _in_parallel(runs: Sequence[Callable[[float], list[float]]], seconds: float) -> list[float]:
    """Run all of them at once; return the times of all their calls."""
    with ThreadPoolExecutor(len(runs)) as threads:
        times = list(threads.map(lambda run: run(seconds), runs))
    return [one for part in times for one in part]


def _append(client: StorageClient, path: str, rows: pa.RecordBatch) -> None:
    client.append(path, rows)


# -- upserts --------------------------------------------------------------------------------------


def _report_upserts(home: JournalHome, services: dict[str, tuple[str, int]], sizes: Sizes) -> None:
    """Small upserts of stored keys by many connections: several write groups are in flight."""
    writers = max(sizes.writers)
    base = make_rows(sizes.keys)
    calls = [
        changing_calls(base, row_count=SMALL_ROWS, call_count=_CALLS_A_WRITER, seed=writer)
        for writer in range(writers)
    ]
    tallies = take_turns(
        {
            name: Contender(run=_upserts(endpoint, base, calls), pid=pid)
            for name, (endpoint, pid) in services.items()
        },
        turns=sizes.turns,
        seconds=sizes.turn_s,
    )
    none = tallies["none"]
    for ack in _ACKS:
        report(
            f"upsert, {SMALL_ROWS} rows of {sizes.keys:,} keys a call, {writers} connections,"
            f" ack {ack}, {home.kind}",
            measured=f"{tallies[ack].rate:,.0f} calls/s, p50 {tallies[ack].p50_ms:.1f} ms"
            f" ({tallies[ack].processor})",
            limit=f"no journal: {none.rate:,.0f} calls/s, p50 {none.p50_ms:.1f} ms"
            f" ({none.processor})",
            ratio=tallies[ack].rate / none.rate,
            bar="not set",
            reached=None,
        )


def _upserts(
    endpoint: str, base: pa.RecordBatch, calls: Sequence[Sequence[pa.Table]]
) -> Callable[[float], list[float]]:
    """Return a run of writers in parallel, each with calls and a connection of its own."""
    path = "default.upserted"
    with StorageClient(endpoint) as client:
        client.create_table(path, SCHEMA, primary_key=["id"], bucket_count=4, properties=_NO_LAKE)
        client.upsert(path, pa.Table.from_batches([base]))

    def writer(own: Sequence[pa.Table]) -> Callable[[float], list[float]]:
        client, turn = StorageClient(endpoint), itertools.cycle(own)
        return calling(lambda: _upsert(client, path, next(turn)))

    return partial(_in_parallel, [writer(own) for own in calls])


def _upsert(client: StorageClient, path: str, rows: pa.Table) -> None:
    client.upsert(path, rows)


# -- latency --------------------------------------------------------------------------------------


def _report_latency(home: JournalHome, services: dict[str, tuple[str, int]], sizes: Sizes) -> None:
    """One append at a time, beside the store's own PUT of as many bytes, in turns."""
    rows = make_rows(SMALL_ROWS)
    objects = open_store(home.url, properties=home.properties)
    data = rows.serialize().to_pybytes()
    numbers = iter(range(1 << 40))
    clients = {name: StorageClient(services[name][0]) for name in ("none", "journal")}
    for client in clients.values():
        client.create_table("default.small", SCHEMA, properties=_NO_LAKE)
    appends = {
        name: partial(_append, client, "default.small", rows) for name, client in clients.items()
    }

    def put() -> None:
        objects.create(f"bench/{next(numbers):012d}", [data])

    def put_after_append() -> float:
        appends["none"]()
        start = time.perf_counter()
        put()
        return time.perf_counter() - start

    store_pid = None if home.store is None else home.store.pid
    contenders = {
        "put": Contender(run=calling(put), store_pid=store_pid),
        "after": Contender(run=calling(put_after_append), store_pid=store_pid),
        "none": Contender(run=calling(appends["none"]), pid=services["none"][1]),
        "journal": Contender(
            run=calling(appends["journal"]), pid=services["journal"][1], store_pid=store_pid
        ),
    }
    tallies = take_turns(contenders, turns=sizes.turns, seconds=sizes.turn_s)
    measured, after = tallies["journal"], tallies["after"]
    name = (
        f"p50 of one append of {SMALL_ROWS} rows, ack journal, nothing else in flight, {home.kind}"
    )
    limit_ms = tallies["put"].p50_ms + 2.0
    report(
        name,
        measured=f"{measured.p50_ms:.2f} ms, p99 {measured.p99_ms:.2f} ms"
        f" (no journal: {tallies['none'].p50_ms:.2f} ms)",
        limit=f"the store's own PUT + 2 ms: {limit_ms:.2f} ms",
        ratio=measured.p50_ms / limit_ms,
        bar="at most 1",
        reached=measured.p50_ms <= limit_ms,
    )
    limit_ms = after.p50_ms + 2.0
    report(
        f"{name}, beside a PUT after an append",
        measured=f"{measured.p50_ms:.2f} ms{_of_store(measured)}",
        limit=f"the store's own PUT after an append + 2 ms: {limit_ms:.2f} ms{_of_store(after)};"
        f" one PUT after the other: {tallies['put'].p50_ms + 2.0:.2f} ms"
        f"{_of_store(tallies['put'])}",
        ratio=measured.p50_ms / limit_ms,
        bar="at most 1",
        reached=None,
    )


def _of_store(tally: Tally) -> str:
    """Return what a call took of the store's processor time, where that is another process."""
    return f" (store {tally.store_ms:.2f} ms of processor)" if tally.store_s else ""


# -- takeover -------------------------------------------------------------------------------------


def _report_takeovers(store: StoreKind, sizes: Sizes) -> None:
    """Kill the owner's machine again and again; how long until a write is acknowledged."""
    with JournalHome(store) as home, Pair(home, "--lease-ms", str(LEASE_MS)) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(_PATIENCE_S)
        with StorageClient(pair.endpoint, timeout_s=_PATIENCE_S) as client:
            client.create_table("default.keyed", SCHEMA, primary_key=["id"], properties=_NO_LAKE)
            client.upsert("default.keyed", make_rows(sizes.keys))
            seconds = []
            for _ in range(sizes.takeovers):
                standby.start("--standby")
                _wait_until_warm(standby)
                owner.lose()
                lost_s = time.monotonic()
                client.upsert("default.keyed", make_rows(1))
                seconds.append(time.monotonic() - lost_s)
                assert client.count("default.keyed") == sizes.keys
                owner, standby = standby, owner
    limit_s = LEASE_MS / 1_000 + 2.0
    report(
        f"takeover by a warm standby, {sizes.keys:,} keys, owner and its disk lost,"
        " to the first write",
        measured=f"{median(seconds):.2f} s, slowest of {sizes.takeovers}: {max(seconds):.2f} s",
        limit=f"lease of {LEASE_MS / 1_000:g} s + 2 s",
        ratio=median(seconds) / limit_s,
        bar="at most 1",
        reached=max(seconds) <= limit_s,
    )


def _wait_until_warm(standby: Machine) -> None:
    """Wait until it has applied all there is of the journal."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        with urllib.request.urlopen(f"{standby.endpoint}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        role = re.search(r'^streamhouse_role\{.*role="standby".*\} (\S+)$', text, re.MULTILINE)
        lag = re.search(r"^streamhouse_standby_lag_objects (\S+)$", text, re.MULTILINE)
        if role is not None and lag is not None and (float(role[1]), float(lag[1])) == (1, 0):
            return
        time.sleep(0.2)
    raise AssertionError(f"the standby does not get to the end of the journal: {text}")


if __name__ == "__main__":
    main()
