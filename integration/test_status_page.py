"""The status page in headless Chromium: it draws, at both widths and in both colour schemes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.storage_service.client import StorageClient
from tests.support.service_process import ServiceProcess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def _look(url: str, *arguments: str) -> str:
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--virtual-time-budget=3000", *arguments, url),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Where screenshots go: `STREAMHOUSE_ARTIFACTS`, else the test's own directory."""
    folder = Path(os.environ.get("STREAMHOUSE_ARTIFACTS", tmp_path)) / "status-page"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_tables_workers_and_errors_are_drawn(tmp_path: Path, artifacts: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("orders", SCHEMA, bucket_count=3)
            client.create_table("customers", SCHEMA, primary_key=["id"])
            rows = pa.table({"id": range(1000), "name": ["x"] * 1000}, schema=SCHEMA)
            client.append("orders", rows)
            client.upsert("customers", rows)
            # Tables are shown once they have been measured, every few seconds.
            while len(client.status()["tables"]) < 2:
                time.sleep(0.1)  # sleep: another process measures them
            claimed = client.claim_tiering("worker-1", tables=["orders"], force=True)
            client.fail_tiering("orders", epoch=claimed.epoch, error="the catalog is <b>away</b>")
            claimed = client.claim_tiering("worker-2", tables=["orders"], force=True)
            client.heartbeat_tiering(
                "orders", epoch=claimed.epoch, step="writing", rows_done=250, rows_planned=1000
            )
            client.claim_tiering("worker-3", tables=["orders"])

        page = f"{service.endpoint}/#table-default.orders"
        dom = _look(page, "--dump-dom")

        assert 'id="table-default.orders" open' in dom
        assert "primary key table" in dom
        assert "worker-2: default.orders" in dom
        assert "writing 250 of 1,000 rows" in dom
        assert "worker-3: idle, other rounds have the tables that are behind" in dom
        # What others wrote is text, never markup.
        assert "the catalog is &lt;b&gt;away&lt;/b&gt;" in dom
        assert dom.count("<svg") >= 4
        for name, size, scheme in (("wide", "1280,900", 1), ("phone", "390,844", 0)):
            shot = artifacts / f"{name}.png"
            _look(
                page,
                f"--window-size={size}",
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--screenshot={shot}",
            )
            assert shot.read_bytes().startswith(b"\x89PNG")


def test_with_a_token_the_page_asks_for_it(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    token_file.chmod(0o600)
    with ServiceProcess(tmp_path / "data", "--token-file", str(token_file)) as service:
        dom = _look(service.endpoint, "--dump-dom")

    assert "a token is needed" in dom
    assert '<form id="login">' in dom
    assert '<div id="content" hidden="">' in dom
