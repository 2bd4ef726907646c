"""A key table under random updates in Iceberg's format version 3, against the same in version 2.

Both tables have 500,000 rows in the lake, in four buckets. Then 40 rounds of 500 updates of random
keys go to both in turns, without maintenance. Version 2 writes position delete files, version 3
deletion vectors. Bytes and entries of deletes are those of the last snapshot. A read is the whole
table by `client.read`, three times in turns.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import load_catalog

from benchmarks.harness import SCHEMA, make_rows, median, report
from streamhouse import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.lake.snapshots.live_files import live_data_files
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.service_process import ServiceProcess

KEYS = 500_000
ROUNDS = 40
ROUND_ROWS = 500
BUCKETS = 4
READS = 3
VERSIONS = ("2", "3")
BAR = 1.1


def main() -> None:
    """Report rounds, deletes and reads of version 3 against version 2."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        lake, catalog = IcebergLake(described), load_catalog(described.name, **described.properties)
        workers = {version: _worker(client, lake, version) for version in VERSIONS}
        rounds: dict[str, list[float]] = {version: [] for version in VERSIONS}
        rng = np.random.default_rng(7)
        for number in range(ROUNDS):
            keys = np.sort(rng.choice(KEYS, ROUND_ROWS, replace=False))
            rows = make_rows(ROUND_ROWS, seed=number)
            rows = rows.set_column(0, SCHEMA.field("id"), pa.array(keys))
            for version in VERSIONS:
                client.upsert(_path(version), rows)
                (summary,) = workers[version].run_once()
                assert summary.error is None, summary
                rounds[version].append(summary.seconds)
        _report("seconds of a round", {v: median(rounds[v][5:]) for v in VERSIONS}, "s")
        deletes = {
            version: [
                file
                for file in live_data_files(catalog.load_table(f"default.{_path(version)}"))
                if file.content.value
            ]
            for version in VERSIONS
        }
        _report("entries of deletes", {v: float(len(deletes[v])) for v in VERSIONS}, "")
        paths = {v: {f.file_path: f.file_size_in_bytes for f in deletes[v]} for v in VERSIONS}
        _report("KiB of deletes", {v: sum(paths[v].values()) / 1024 for v in VERSIONS}, "KiB")
        reads: dict[str, list[float]] = {version: [] for version in VERSIONS}
        for _ in range(READS + 1):
            for version in VERSIONS:
                start = time.perf_counter()
                assert client.read(_path(version)).num_rows == KEYS
                reads[version].append(time.perf_counter() - start)
        _report("seconds of a read", {v: median(reads[v][1:]) for v in VERSIONS}, "s")
        lake.close()


def _path(version: str) -> str:
    return f"version_{version}"


def _worker(client: StreamhouseClient, lake: IcebergLake, version: str) -> TieringService:
    properties = {
        "table.datalake.format-version": version,
        "table.datalake.auto-maintenance": "false",
    }
    path = _path(version)
    client.create_table(
        path, SCHEMA, primary_key=["id"], bucket_count=BUCKETS, properties=properties
    )
    client.upsert(path, pa.Table.from_batches([make_rows(KEYS)]))
    worker = TieringService(
        client=StorageClient.of(client), lake=lake, runner=ThreadRunner(), tables=[path]
    )
    worker.run_once()
    return worker


def _report(what: str, figures: dict[str, float], unit: str) -> None:
    before, now = (figures[version] for version in VERSIONS)
    report(
        f"{what}, {ROUNDS} rounds of {ROUND_ROWS} updates, format version 3",
        measured=f"{now:.3g} {unit}".strip(),
        limit=f"version 2: {before:.3g} {unit}".strip(),
        ratio=now / before,
        bar=f"at most {BAR}",
        reached=now / before <= BAR,
    )


if __name__ == "__main__":
    main()
