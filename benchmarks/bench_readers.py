"""Reads over 32 kept connections without readers and with `serve --readers 2`, in pairs.

GETs of one key, lookups of 100 and of 1,000 keys a call, and over 8 connections fetches of 1,000
rows of a log. Both services have the same 200,000
rows; the client and all processes share the cores. Before the measurement the client asks until the
readers have its connections. Then upserts of 10 rows, one after the other, at the same two
services, whose readers hold the table and have nothing to do; what a publication takes of such an
upsert is measured alone, in this process.

Where other programs keep the cores busy, the rates say little; the processor time of a call is what
a core is kept from other work, in all processes of the service.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import urllib3

from benchmarks.harness import (
    SCHEMA,
    make_rows,
    median,
    percentile,
    process_cpu_seconds,
    processor_rate,
    report,
)
from benchmarks.many_connections import Answers, get_rows, post_rows
from streamhouse.client import StorageClient
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.storage_service.server.readers._board import Board
from tests.support.reader_world import reader_pids
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

KEYS = 200_000
CONNECTIONS = 32
READERS = 2
SECONDS = 5.0
ROUNDS = 5
BUCKETS = 4
UPSERTS = 300
UPSERT_ROWS = 10
LOOKUP_KEYS = (100, 1_000)
LOOKUP_REQUESTS = 20
PATH = "bench_readers"
LOG = "bench_readers_log"
FETCHED_ROWS = 1_000
FETCHERS = 8


def main() -> None:
    """Report all figures."""
    base = make_rows(KEYS)
    with _service(base) as alone, _service(base, "--readers", str(READERS)) as helped:
        wait_until(lambda: _held_connections(helped), "connections that readers have")
        _report_reads(f"GET of one key of {KEYS:,}", alone, helped, _answers)
        for count in LOOKUP_KEYS:
            ask = functools.partial(_lookup_answers, _lookups(count))
            _report_reads(f"lookup of {count:,} keys of {KEYS:,}", alone, helped, ask)
        what = f"fetch of {FETCHED_ROWS:,} rows"
        _report_reads(what, alone, helped, _fetch_answers, connections=FETCHERS)
        _report_writes(base, alone, helped)


@contextlib.contextmanager
def _service(base: pa.RecordBatch, *arguments: str) -> Iterator[ServiceProcess]:
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(Path(directory), *arguments) as service,
    ):
        with StorageClient(service.endpoint) as client:
            properties = {"table.datalake.enabled": "false"}
            client.create_table(
                PATH, SCHEMA, primary_key=["id"], bucket_count=BUCKETS, properties=properties
            )
            client.upsert(PATH, pa.Table.from_batches([base]))
            client.create_table(LOG, SCHEMA, bucket_count=1, properties=properties)
            for at in range(0, KEYS, FETCHED_ROWS):
                client.append(LOG, pa.Table.from_batches([base.slice(at, FETCHED_ROWS)]))
        yield service


def _held_connections(service: ServiceProcess) -> bool:
    _answers(service, seconds=1.5)
    text = urllib3.request("GET", f"{service.endpoint}/metrics").data.decode()
    return "\nstreamhouse_reader_connections 0.0" not in text and len(reader_pids(service)) > 1


def _answers(service: ServiceProcess, *, seconds: float = SECONDS) -> Answers:
    prefix = f"/v1/tables/{PATH}/rows/"
    return get_rows(service.endpoint, prefix, keys=KEYS, connections=CONNECTIONS, seconds=seconds)


def _processor_s(service: ServiceProcess) -> float:
    return sum(map(process_cpu_seconds, (service.pid, *reader_pids(service))))


def _lookups(count: int) -> list[bytes]:
    """Return bodies that look up random keys."""
    rng = np.random.default_rng(count)
    schema = pa.schema([SCHEMA.field("id")])
    batches = [
        pa.record_batch([pa.array(rng.integers(0, KEYS, count))], schema=schema)
        for _ in range(LOOKUP_REQUESTS)
    ]
    return [encode_append_body(schema, [(None, 0, keys)]).to_pybytes() for keys in batches]


def _lookup_answers(bodies: list[bytes], service: ServiceProcess) -> Answers:
    paths = [itertools.repeat(f"/v1/tables/{PATH}/lookup")] * CONNECTIONS
    # Each connection begins with another body.
    orders = [itertools.cycle(bodies[at:] + bodies[:at]) for at in range(CONNECTIONS)]
    times = post_rows(service.endpoint, paths, orders, seconds=SECONDS)
    return Answers(count=len(times), p99_ms=percentile(times, 0.99) * 1e3, seconds=SECONDS)


def _fetch_answers(service: ServiceProcess) -> Answers:
    with StorageClient(service.endpoint) as client:
        table_id = client.describe_table(LOG).table_id
    # One batch, which has the offset.
    prefix = f"/v1/tables/{LOG}/buckets/0/fetch?table_id={table_id}&max_bytes=1&offset="
    return get_rows(service.endpoint, prefix, keys=KEYS, connections=FETCHERS, seconds=SECONDS)


def _report_reads(
    what: str,
    alone: ServiceProcess,
    helped: ServiceProcess,
    ask: Callable[[ServiceProcess], Answers],
    *,
    connections: int = CONNECTIONS,
) -> None:
    rates: dict[ServiceProcess, list[float]] = {alone: [], helped: []}
    processor_us: dict[ServiceProcess, list[float]] = {alone: [], helped: []}
    p99_ms: dict[ServiceProcess, list[float]] = {alone: [], helped: []}
    for _ in range(ROUNDS):
        for service in (alone, helped):
            before_s = _processor_s(service)
            answers = ask(service)
            spent_s = _processor_s(service) - before_s
            rates[service].append(answers.rate)
            processor_us[service].append(spent_s / answers.count * 1e6)
            p99_ms[service].append(answers.p99_ms)
    ratio = median(rates[helped]) / median(rates[alone])
    report(
        f"{what}, {connections} connections, with --readers {READERS}",
        measured=f"{median(rates[helped]) / 1e3:,.1f} k/s, p99 {median(p99_ms[helped]):.1f} ms,"
        f" {median(processor_us[helped]):.0f} us of processor each; load {os.getloadavg()[0]:.0f}",
        limit=f"without: {median(rates[alone]) / 1e3:,.1f} k/s, p99 {median(p99_ms[alone]):.1f} ms,"
        f" {median(processor_us[alone]):.0f} us",
        ratio=ratio,
        bar="at least 1.6",
        reached=ratio >= 1.6,
    )


def _report_writes(base: pa.RecordBatch, alone: ServiceProcess, helped: ServiceProcess) -> None:
    rates: dict[ServiceProcess, list[float]] = {alone: [], helped: []}
    spent_s = dict.fromkeys(rates, 0.0)
    rows = pa.Table.from_batches([base.slice(0, UPSERT_ROWS)])
    for _ in range(2 * ROUNDS):
        for service in (alone, helped):
            with StorageClient(service.endpoint) as client:
                client.upsert(PATH, rows)
                before_s, started_s = _processor_s(service), time.perf_counter()
                for _ in range(UPSERTS):
                    client.upsert(PATH, rows)
                rates[service].append(UPSERTS / (time.perf_counter() - started_s))
                spent_s[service] += _processor_s(service) - before_s
    ratio = median(rates[helped]) / median(rates[alone])
    upsert_us = {service: s / (2 * ROUNDS * UPSERTS) * 1e6 for service, s in spent_s.items()}
    report(
        f"upserts of {UPSERT_ROWS} rows by one client beside {READERS} idle readers",
        measured=f"{median(rates[helped]):,.0f} calls/s, {upsert_us[helped]:.0f} us of processor"
        f" each; load {os.getloadavg()[0]:.0f}",
        limit=f"without: {median(rates[alone]):,.0f} calls/s, {upsert_us[alone]:.0f} us",
        ratio=ratio,
        bar="at least 0.97",
        reached=ratio >= 0.97,
    )
    _report_publication(upsert_us[alone])


def _report_publication(upsert_us: float) -> None:
    """Report what the owner does for its readers at each write: the record of a slot."""
    board, ends = Board.create(), [0] * BUCKETS

    def publish() -> None:
        ends[0] += 1
        board.write(1, 1, ends, ends)

    publication_us = 1e6 / processor_rate(publish, 1, turns=5, calls=20_000)
    board.close()
    share = publication_us / upsert_us
    report(
        f"publication of {BUCKETS} buckets to readers, at each upsert of {UPSERT_ROWS} rows",
        measured=f"{publication_us:.1f} us of processor",
        limit=f"the upsert: {upsert_us:.0f} us",
        ratio=share,
        bar="at most 0.01",
        reached=share <= 0.01,
    )


if __name__ == "__main__":
    main()
