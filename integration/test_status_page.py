"""The status page of a real service, in a browser: what the service answers is what is drawn.

How the page looks, from answers made up for it, is judged beside its figures in `tests/unit/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.storage_service.server.access._grants import token_hash
from streamhouse.tiering.worker.embedded import EmbeddedTieringWorker
from tests.support.chromium import CHROMIUM, Page, chromium
from tests.support.service_process import ServiceProcess

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(width=1600)
        yield opened


def _text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r})?.innerText ?? ''"))


def test_tables_workers_and_errors_are_drawn(page: Page, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("orders", SCHEMA, bucket_count=3)
            client.create_table("customers", SCHEMA, primary_key=["id"])
            rows = pa.table({"id": range(1000), "name": ["x"] * 1000}, schema=SCHEMA)
            client.append("orders", rows)
            client.upsert("customers", rows)
            claimed = client.claim_tiering("worker-1", tables=["orders"], force=True)
            table_id = claimed.state.table.table_id
            client.fail_tiering(
                "orders",
                table_id=table_id,
                epoch=claimed.epoch,
                error="the catalog is <b>away</b>",
            )
            claimed = client.claim_tiering("worker-2", tables=["orders"], force=True)
            client.heartbeat_tiering(
                "orders",
                table_id=table_id,
                epoch=claimed.epoch,
                step="writing",
                rows_done=250,
                rows_planned=1000,
            )
            client.claim_tiering("worker-3", tables=["orders"])

        page.open(service.endpoint)
        # Tables are listed once they have been measured; the page asks again by itself.
        page.wait_for("document.querySelectorAll('#tables tbody tr').length === 2")

        tables, workers = _text(page, "#tables"), _text(page, "#workers")
        assert "default.orders" in tables
        assert "default.customers" in tables
        assert "writing, 25" in workers
        assert all(f"worker-{number}" in workers for number in (2, 3))
        # What others wrote is text, never markup.
        page.open(f"{service.endpoint}/#/default/orders")
        page.wait_for("document.querySelector('#one h1') !== null")
        assert "the catalog is <b>away</b>" in _text(page, "#one")
        page.open(f"{service.endpoint}/#/default/customers")
        page.wait_for("document.querySelector('#one h1')?.textContent === 'default.customers'")
        assert "primary key table" in _text(page, "#one")
        assert page.messages == []


def test_with_a_token_the_page_asks_for_it(page: Page, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    token_file.chmod(0o600)
    with ServiceProcess(tmp_path / "data", "--token-file", str(token_file)) as service:
        page.open(service.endpoint)
        page.wait_for(
            "document.querySelector('h1')?.checkVisibility() && document.body.innerText"
            ".includes('A token is needed')"
        )

        page.run(
            "{ document.getElementById('token').value = 'secret';"
            " document.getElementById('token').form.requestSubmit(); }"
        )
        page.wait_for("document.body.innerText.includes('No table yet')")


def test_a_tables_page_is_read_with_the_grants_of_the_token(page: Page, tmp_path: Path) -> None:
    tokens, grants = tmp_path / "token", tmp_path / "grants.toml"
    tokens.write_text("secret")
    grants.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\n'
            f'grants = ["read:service"{more}]\n'
            for name, more in (("watcher", ""), ("reader", ', "read:shop.*"'))
        )
    )
    for file in (tokens, grants):
        file.chmod(0o600)
    arguments = ("--token-file", str(tokens), "--grants", str(grants), "--tiering", "embedded")
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        with StreamhouseClient(service.endpoint, token="secret") as client:
            client.create_table(
                "shop.orders",
                "id BIGINT NOT NULL COMMENT 'the number', item STRING, raw BINARY",
                bucket_count=2,
                properties={"table.datalake.freshness": "1s"},
            )
            hostile = "<img src=x onerror='window.hacked=1'>"
            rows = [{"id": 2**53 + n, "item": hostile, "raw": b"\x00\xff"} for n in range(1, 4)]
            client.append("shop.orders", rows)
            client.wait_tiered("shop.orders")

        def open_as(token: str, ready: str) -> None:
            page.open("about:blank")
            page.wait_for("location.href === 'about:blank'")
            page.open(f"{service.endpoint}/#/shop/orders")
            page.wait_for("document.querySelector('#login')?.checkVisibility()")
            page.run(
                f"{{ document.getElementById('token').value = {token!r};"
                " document.getElementById('token').form.requestSubmit(); }"
            )
            page.wait_for(ready)

        open_as("watcher", "document.querySelector('#one-rows')?.innerText.includes('This token')")
        assert "it needs a grant to read shop.orders" in _text(page, "#one-rows")
        assert "may not see the columns" in _text(page, "#one-columns")
        page.run("sessionStorage.clear()")

        open_as("reader", "document.querySelectorAll('#one-snapshots tbody tr').length > 0")
        page.wait_for("document.querySelectorAll('#one-rows tbody tr').length === 3")
        shown = _text(page, "#one-rows")
        assert hostile in shown
        assert "9007199254740995" in shown
        assert "0x00ff" in shown
        assert "the number" in _text(page, "#one-columns")
        assert "shop/orders" in _text(page, "#one-place")
        assert page.run("window.hacked === undefined && !document.querySelector('img')")
        page.run("sessionStorage.clear()")


def test_an_embedded_worker_is_listed_while_it_starts(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service, StorageClient(service.endpoint) as client:
        EmbeddedTieringWorker(endpoint=service.endpoint, worker_id="embedded")._say_starting()

        assert client.status()["idle_workers"] == [{"worker_id": "embedded", "reason": "starting"}]
