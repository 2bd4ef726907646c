"""Tiering of upserts against tiering of the same number of log rows, and CPU over many rounds.

Both move rows of five columns in four buckets. The primary key table has 1 M rows in the lake; of
the upserts half replace one of them and half are new, so the round reads one and a half times as
many changes, and finds and deletes half a million rows of the lake. Rows/s are upserted rows, not
lines of the changelog, against appended rows of the same columns in a log table. Seconds are those
of rounds; what maintenance does after one is not in them, for neither kind of table. A round begins
once the service rests, because right after the upserts it hands up to half a million rows of each
bucket to RocksDB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, report, wait_until_idle
from streamhouse.client import StorageClient
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.service_process import ServiceProcess

KEYS = 1_000_000
UPSERTS = 1_000_000
BUCKETS = 4
REPEATS = 3
BAR = 0.5
ROUNDS = 500
ROUND_ROWS = 500
ROUND_KEYS = 20_000
WINDOW = 50
CPU_BAR = 1.5


def main(rounds: int = ROUNDS) -> None:
    """Report rows/s of both kinds of table, and the CPU of a round after many."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StorageClient(service.endpoint) as client,
    ):
        lake = IcebergLake(client.lake_catalog())
        world = _World(client, lake, service.pid)
        logs, upserts = [], []
        for repeat in range(REPEATS + 1):
            log_rate = _log_rate(world, f"log_{repeat}")
            upsert_rate = _upsert_rate(world, f"upserts_{repeat}")
            # The first run warms up: imports, the catalog, the page cache.
            if repeat:
                logs.append(log_rate)
                upserts.append(upsert_rate)
        ratio = median([a / b for a, b in zip(upserts, logs, strict=True)])
        report(
            f"tiering {UPSERTS / 1e6:.0f} M upserts, half of them updates, {BUCKETS} buckets",
            measured=f"{median(upserts) / 1e6:.2f} M rows/s",
            limit=f"as many rows of a log table: {median(logs) / 1e6:.2f} M rows/s",
            ratio=ratio,
            bar=f"at least {BAR}",
            reached=ratio >= BAR,
        )
        first, last = _round_cpu(client, lake, rounds)
        report(
            f"CPU of round {rounds} of a table under update, {ROUND_ROWS} upserts a round",
            measured=f"{last * 1e3:.0f} ms",
            limit=f"round {WINDOW}: {first * 1e3:.0f} ms",
            ratio=last / first,
            bar=f"at most {CPU_BAR}",
            reached=last / first <= CPU_BAR,
        )
        lake.close()


class _World(NamedTuple):
    """A service, a lake, and the process id of the service."""

    client: StorageClient
    lake: IcebergLake
    pid: int

    def round_seconds(self, path: str) -> float:
        """Tier a table; return the seconds of the round."""
        wait_until_idle(self.pid)
        tiering = TieringService(
            client=self.client, lake=self.lake, runner=ThreadRunner(), tables=[path]
        )
        (summary,) = tiering.run_once()
        assert summary.error is None, summary
        return summary.seconds


def _log_rate(world: _World, path: str) -> float:
    client = world.client
    client.create_table(path, SCHEMA, bucket_count=BUCKETS)
    client.append(path, pa.Table.from_batches([make_rows(UPSERTS)]))
    rate = UPSERTS / world.round_seconds(path)
    client.drop_table(path)
    return rate


def _upsert_rate(world: _World, path: str) -> float:
    client = world.client
    client.create_table(path, SCHEMA, primary_key=["id"], bucket_count=BUCKETS)
    client.upsert(path, pa.Table.from_batches([make_rows(KEYS)]))
    world.round_seconds(path)
    updated = make_rows(KEYS, seed=1).slice(KEYS // 2, UPSERTS // 2)
    inserted = make_rows(UPSERTS // 2, first_id=KEYS)
    client.upsert(path, pa.Table.from_batches([updated, inserted]))
    rate = UPSERTS / world.round_seconds(path)
    client.drop_table(path)
    return rate


def _round_cpu(client: StorageClient, lake: IcebergLake, rounds: int) -> tuple[float, float]:
    """Return the median CPU seconds of this process in an early and in the last rounds."""
    path = "many_rounds"
    client.create_table(path, SCHEMA, primary_key=["id"], bucket_count=BUCKETS)
    rng = np.random.default_rng(7)
    worker = TieringService(client=client, lake=lake, runner=ThreadRunner(), tables=[path])
    spent = []
    for number in range(rounds):
        rows = make_rows(ROUND_ROWS, seed=number)
        keys = np.sort(rng.choice(ROUND_KEYS, ROUND_ROWS, replace=False))
        client.upsert(path, rows.set_column(0, SCHEMA.field("id"), pa.array(keys)))
        before = time.process_time()
        worker.run_once()
        spent.append(time.process_time() - before)
    early = spent[WINDOW // 2 : WINDOW + WINDOW // 2]
    return median(early), median(spent[-WINDOW:])


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:]))
