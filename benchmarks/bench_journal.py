"""Appends with a journal against the same without one, and what a takeover by a standby takes."""

from __future__ import annotations

import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Final

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, report
from benchmarks.turns import Contender, Tally, calling, take_turns
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.journal.store_opening import open_store
from tests.support.journal_machines import JournalHome, Machine, Pair, StoreKind
from tests.support.service_process import ServiceProcess

BATCH_ROWS = 2_000
WRITERS = 8
TURNS = 6
TURN_S = 2.0
SMALL_ROWS = 100
LEASE_MS = 2_000
TAKEOVERS = 5
KEYS = 200_000
_ACKS: Final = ("disk", "journal")
_BARS: Final = {"disk": 0.9, "journal": 0.75}
_PATIENCE_S: Final = 60.0
_NO_LAKE: Final = {"table.datalake.enabled": "false"}


def main() -> None:
    """Report rows/s, the latency of one append, and takeovers, on a directory and on S3."""
    stores: tuple[StoreKind, ...] = ("file", "s3")
    for store in stores:
        with (
            JournalHome(store) as home,
            tempfile.TemporaryDirectory() as directory,
            ServiceProcess(directory) as plain,
        ):
            homes = {ack: home.sibling(f"ack-{ack}") for ack in _ACKS}
            machines = {
                ack: Machine(homes[ack], f"ack-{ack}", "--journal-ack", ack) for ack in _ACKS
            }
            try:
                for machine in machines.values():
                    machine.start()
                    machine.wait_until_owner(_PATIENCE_S)
                pids = {ack: _pid(machine) for ack, machine in machines.items()}
                services = {"none": (plain.endpoint, plain.pid)} | {
                    ack: (machine.endpoint, pids[ack]) for ack, machine in machines.items()
                }
                _report_rates(store, services)
                _report_latency(store, home, services)
            finally:
                for machine in machines.values():
                    machine.end()
    _report_takeovers()


def _pid(machine: Machine) -> int:
    assert machine.process is not None
    return machine.process.pid


# -- throughput ---------------------------------------------------------------------------------


def _report_rates(store: str, services: dict[str, tuple[str, int]]) -> None:
    rows = make_rows(BATCH_ROWS)
    contenders = {
        name: Contender(run=_writers(endpoint, rows), pid=pid)
        for name, (endpoint, pid) in services.items()
    }
    tallies = take_turns(contenders, turns=TURNS, seconds=TURN_S)
    for ack in _ACKS:
        ratio = tallies[ack].rate / tallies["none"].rate
        report(
            f"append, {BATCH_ROWS:,}-row batches, {WRITERS} connections, ack {ack}, {store}",
            measured=_rate(tallies[ack]),
            limit=f"no journal: {_rate(tallies['none'])}",
            ratio=ratio,
            bar=f"at least {_BARS[ack]}",
            reached=ratio >= _BARS[ack],
        )


def _rate(tally: Tally) -> str:
    return f"{tally.rate * BATCH_ROWS / 1e3:,.0f} k rows/s ({tally.processor})"


def _writers(endpoint: str, rows: pa.RecordBatch) -> Callable[[float], list[float]]:
    """Return a run of writers in parallel, each with a connection of its own."""
    path = "default.appended"
    with StorageClient(endpoint) as client:
        client.create_table(path, SCHEMA, bucket_count=4, properties=_NO_LAKE)
    clients = [StorageClient(endpoint) for _ in range(WRITERS)]

    def run(seconds: float) -> list[float]:
        times: list[list[float]] = [[] for _ in clients]

        def write(number: int) -> None:
            call = calling(partial(_append, clients[number], path, rows))
            times[number] = call(seconds)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [one for part in times for one in part]

    return run


def _append(client: StorageClient, path: str, rows: pa.RecordBatch) -> None:
    client.append(path, rows)


# -- latency --------------------------------------------------------------------------------------


def _report_latency(store: str, home: JournalHome, services: dict[str, tuple[str, int]]) -> None:
    """One append at a time, beside the store's own PUT of as many bytes, in turns."""
    rows = make_rows(SMALL_ROWS)
    objects = open_store(home.url, properties=home.properties)
    data = rows.serialize().to_pybytes()
    numbers = iter(range(1 << 40))
    contenders = {
        "put": Contender(run=calling(lambda: objects.create(f"bench/{next(numbers):012d}", [data])))
    }
    for name in ("none", "journal"):
        endpoint, pid = services[name]
        client = StorageClient(endpoint)
        client.create_table("default.small", SCHEMA, properties=_NO_LAKE)
        run = calling(partial(_append, client, "default.small", rows))
        contenders[name] = Contender(run=run, pid=pid)
    tallies = take_turns(contenders, turns=TURNS, seconds=TURN_S)
    limit_ms = tallies["put"].p50_ms + 2.0
    measured = tallies["journal"]
    report(
        f"p50 of one append of {SMALL_ROWS} rows, ack journal, nothing else in flight, {store}",
        measured=f"{measured.p50_ms:.2f} ms, p99 {measured.p99_ms:.2f} ms"
        f" (no journal: {tallies['none'].p50_ms:.2f} ms)",
        limit=f"the store's own PUT + 2 ms: {limit_ms:.2f} ms",
        ratio=measured.p50_ms / limit_ms,
        bar="at most 1",
        reached=measured.p50_ms <= limit_ms,
    )


# -- takeover -------------------------------------------------------------------------------------


def _report_takeovers() -> None:
    """Kill the owner's machine again and again; how long until a write is acknowledged."""
    with JournalHome("s3") as home, Pair(home, "--lease-ms", str(LEASE_MS)) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(_PATIENCE_S)
        with StorageClient(pair.endpoint, timeout_s=_PATIENCE_S) as client:
            client.create_table("default.keyed", SCHEMA, primary_key=["id"], properties=_NO_LAKE)
            client.upsert("default.keyed", make_rows(KEYS))
            seconds = []
            for _ in range(TAKEOVERS):
                standby.start("--standby")
                _wait_until_warm(standby)
                owner.lose()
                lost_s = time.monotonic()
                client.upsert("default.keyed", make_rows(1))
                seconds.append(time.monotonic() - lost_s)
                assert client.count("default.keyed") == KEYS
                owner, standby = standby, owner
    limit_s = LEASE_MS / 1_000 + 2.0
    report(
        f"takeover by a warm standby, {KEYS:,} keys, owner and its disk lost, to the first write",
        measured=f"{median(seconds):.2f} s, slowest of {TAKEOVERS}: {max(seconds):.2f} s",
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
            lines = answer.read().decode().splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        if (
            float(found.get('streamhouse_role{role="standby"}', 0)) == 1
            and float(found["streamhouse_standby_lag_objects"]) == 0
            and float(found["streamhouse_standby_lag_seconds"]) < 2
        ):
            return
        time.sleep(0.2)
    raise AssertionError("the standby does not get to the end of the journal")


if __name__ == "__main__":
    main()
