"""Several applications add to the same rows, each version once, while the service is killed -9."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("total", pa.int64())])
_KEYS = range(6)
_APPS = range(3)
_VERSIONS = range(1, 13)


def _keys(app: int, version: int) -> list[int]:
    return Random(100 * app + version).sample(_KEYS, 3)


def _add(client: StorageClient, app: int, version: int) -> None:
    """Read some totals and write them one higher, unless this version has done so before."""
    with client.begin_transaction(
        "totals", operation="upsert", app_id=f"app{app}", version=version
    ) as transaction:
        if transaction.is_skipped:
            return
        read = {bucket: at.high_watermark for bucket, at in client.positions("totals").items()}
        ids = pa.array(_keys(app, version), pa.int64())
        found = client.lookup("totals", pa.table({"id": ids}))
        totals = [total + 1 for total in found["total"].to_pylist()]
        part = transaction.stage(pa.table({"id": ids, "total": totals}, schema=SCHEMA))
        transaction.commit([part], read_offsets=read)


def _work(endpoint: str, app: int, done: threading.Semaphore) -> None:
    with StorageClient(endpoint, timeout_s=10) as client:
        for version in _VERSIONS:
            for _ in range(1000):
                # Somebody was first, or the service is gone: what is known is known by the table.
                with contextlib.suppress(StreamhouseError):
                    _add(client, app, version)
                    break
            else:
                raise AssertionError(f"version {version} of app{app} was never committed")
            done.release()


def test_every_version_of_every_application_counts_once(tmp_path: Path) -> None:
    random = Random(7)
    done = threading.Semaphore(0)
    with contextlib.ExitStack() as running, ThreadPoolExecutor(len(_APPS)) as pool:
        service = running.enter_context(ServiceProcess(tmp_path))
        port = str(urlsplit(service.endpoint).port)
        with StorageClient(service.endpoint) as client:
            client.create_table("totals", SCHEMA, primary_key=("id",), bucket_count=2)
            zeros = pa.table({"id": list(_KEYS), "total": [0] * len(_KEYS)}, schema=SCHEMA)
            client.upsert("totals", zeros)
        workers = [pool.submit(_work, service.endpoint, app, done) for app in _APPS]
        for _ in range(3):
            for _ in range(random.randint(4, 9)):
                assert done.acquire(timeout=120)
            service.kill()
            service = running.enter_context(ServiceProcess(tmp_path, "--port", port))
        for worker in workers:
            worker.result(timeout=120)
        with StorageClient(service.endpoint) as client:
            found = client.lookup("totals", pa.table({"id": pa.array(_KEYS, pa.int64())}))
    added = Counter(key for app in _APPS for version in _VERSIONS for key in _keys(app, version))
    assert dict(zip(found["id"].to_pylist(), found["total"].to_pylist(), strict=True)) == added
