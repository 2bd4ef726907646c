"""A service whose machine is lost: an empty directory, the journal alone, until it serves again.

A gigabyte of log and five million keys, over files and over S3 (SeaweedFS on this machine). And as
many rows by key, lost after their log was cut, that are made again of the lake.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.harness import process_cpu_seconds, report, timed
from benchmarks.large_tables import (
    KEY_BUCKETS,
    KEYS,
    check_keys,
    check_log,
    fill_keys,
    fill_log,
)
from streamhouse.client import StorageClient
from tests.support.object_store import BUCKET, REGION, ObjectStore
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

BAR_S = 60.0
LEASE_MS = 1_000
# So most of the log is in segments that retention deletes once they are tiered.
_CUT_SOON = {"table.log.segment-bytes": "8mb", "table.log.ttl": "1ms"}


def main() -> None:
    """Report how long a service takes on an empty directory, over either store, and of the lake."""
    with tempfile.TemporaryDirectory() as folder:
        _measure_lake(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        _measure("files", Path(folder), [f"file://{folder}/journal"], {})
    with tempfile.TemporaryDirectory() as folder, ObjectStore() as s3:
        lake = f"sqlite:///{folder}/catalog.db"
        properties = {"uri": lake, "s3.endpoint": s3.endpoint, "s3.region": REGION}
        catalog = [f"--catalog-property={name}={value}" for name, value in properties.items()]
        warehouse = f"--warehouse=file://{folder}/warehouse"
        journal = [f"s3://{BUCKET}/journal", *catalog, "--catalog-property=type=sql", warehouse]
        _measure("S3", Path(folder), journal, s3.environment())


def _measure(name: str, folder: Path, journal: list[str], env: dict[str, str]) -> None:
    arguments = ["--journal", *journal, "--lease-ms", str(LEASE_MS)]
    first, second = folder / "first", folder / "second"
    with (
        ServiceProcess(first, *arguments, env=env) as service,
        StorageClient(service.endpoint) as client,
    ):
        rows = fill_log(client)
        fill_keys(client)
        service.terminate()
    stored = sum(path.stat().st_size for path in first.rglob("*.log"))
    copy_s = timed(lambda: shutil.copytree(first / "tables", folder / "copy"))
    shutil.rmtree(folder / "copy")
    shutil.rmtree(first)
    started = time.perf_counter()
    with (
        ServiceProcess(second, *arguments, env=env, start_timeout_s=280) as service,
        StorageClient(service.endpoint) as client,
    ):
        serves_s = time.perf_counter() - started
        check_keys(client)
        check_log(client, rows)
        service.kill()
    report(
        f"an empty directory restored from a journal over {name}, {stored / 1e9:.1f} GB of log,"
        f" {KEYS:,} keys",
        measured=f"serves after {serves_s:.1f} s; 1,000 keys found and all rows counted",
        limit=f"copying the directory's tables on the disk: {copy_s:.1f} s",
        ratio=serves_s / BAR_S,
        bar=f"under {BAR_S:.0f} s",
        reached=serves_s < BAR_S,
    )


def _measure_lake(folder: Path) -> None:
    """Report how long rows by key take whose log is cut, and of which only the lake has all."""
    options = ("--retention-interval-ms", "100")
    with (
        ServiceProcess(folder, *options) as service,
        StorageClient(service.endpoint) as client,
    ):
        fill_keys(client, properties=_CUT_SOON)
        tier_once(client, "default.keys")
        while not all(at.log_start_offset for at in client.positions("keys").values()):
            time.sleep(0.1)
        service.terminate()
    rows = sorted(folder.glob("tables/*/bucket-*/kv"))
    copy_s = timed(lambda: [shutil.copytree(kv, folder / "copy" / kv.parent.name) for kv in rows])
    for directory in (folder / "copy", *rows):
        shutil.rmtree(directory)
    files = list((folder / "lake" / "warehouse").rglob("*.parquet"))
    read_s = timed(lambda: [pq.read_table(file, partitioning=None) for file in files])
    started = time.perf_counter()
    with (
        ServiceProcess(folder, *options, start_timeout_s=280) as service,
        StorageClient(service.endpoint) as client,
    ):
        serves_s, cpu_s = time.perf_counter() - started, process_cpu_seconds(service.pid)
        assert "from=lake" in service.log_text()
        check_keys(client)
        service.kill()
    limit_s = read_s + copy_s
    report(
        f"rows by key made again of the lake, {KEYS:,} keys, {KEY_BUCKETS} buckets",
        measured=f"serves after {serves_s:.1f} s, {cpu_s:.1f} s of processor time",
        limit=f"reading the lake's files and copying the rows' on the disk: {limit_s:.1f} s",
        ratio=serves_s / BAR_S,
        bar=f"under {BAR_S:.0f} s",
        reached=serves_s < BAR_S,
    )


if __name__ == "__main__":
    main()
