"""`streamhouse tier` and `serve --tiering embedded` as people run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.client import StorageClient
from streamhouse.core.model.lake.facts import LakeCatalog
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
_COMMAND = [sys.executable, "-c", "from streamhouse.cli import main; main()", "tier"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as opened:
        yield opened


def _rows(count: int) -> pa.Table:
    return pa.table({"id": range(count), "name": [f"n{i}" for i in range(count)]}, schema=SCHEMA)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("STREAMHOUSE_"):
            monkeypatch.delenv(name)


def _tier(endpoint: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"STREAMHOUSE_ENDPOINT": endpoint, **more}
    return streamhouse("tier", *arguments, expect=None, env=environment)


def _tiered(client: StorageClient, path: str) -> int:
    return sum(p.tiered_offset for p in client.positions(path).values())


def test_once_moves_everything_and_says_what_it_did(
    service: ServiceProcess, client: StorageClient
) -> None:
    client.create_table("once", SCHEMA, bucket_count=2)
    client.append("once", _rows(1_000))

    first = _tier(service.endpoint, "--once", "--table", "once")
    second = _tier(service.endpoint, "--once", "--table", "default.once")

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.startswith("default.once: 1,000 rows in ")
    assert first.stderr == ""
    assert second.stdout.startswith("default.once: nothing to tier (lake snapshot ")
    assert _tiered(client, "once") == 1_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "nowhere"], "table 'default.nowhere' does not exist"),
        (["--catalog-property", "uri=x"], "--catalog-property needs --catalog NAME"),
        (["--catalog", "x", "--catalog-property", "uri"], "'uri' must be KEY=VALUE"),
        (["--endpoint", "http://127.0.0.1:9"], "cannot reach the Streamhouse service at"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    service: ServiceProcess, arguments: list[str], message: str
) -> None:
    done = _tier(service.endpoint, "--once", *arguments)

    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert message in line


def test_a_table_that_fails_is_named_and_others_go_on(
    service: ServiceProcess, client: StorageClient, tmp_path: Path
) -> None:
    client.create_table("good", SCHEMA)
    client.append("good", _rows(10))
    client.create_table("taken", SCHEMA)
    client.append("taken", _rows(10))
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    catalog.create_namespace_if_not_exists("default")
    catalog.create_table("default.taken", SCHEMA)
    catalog.close()

    done = _tier(service.endpoint, "--once", "--table", "good", "--table", "taken")

    assert done.returncode == 1
    good, taken = done.stdout.strip().splitlines()
    assert good.startswith("default.good: 10 rows")
    assert taken.startswith("default.taken: failed: lake table 'default.taken' in catalog")
    assert _tiered(client, "good") == 10


def test_a_table_made_again_under_an_old_name_is_tiered(
    service: ServiceProcess, client: StorageClient
) -> None:
    for rows in (10, 25):
        client.create_table("again", SCHEMA)
        client.append("again", _rows(rows))
        done = _tier(service.endpoint, "--once", "--table", "again")
        assert done.returncode == 0, done.stdout + done.stderr
        assert _lake_rows(client.lake_catalog(), "again") == rows
        table_id = client.describe_table("again").table_id
        client.drop_table("again")

    assert _lake_rows(client.lake_catalog(), f"again__dropped_{table_id - 1}") == 10


def test_another_catalog_can_be_named(client: StorageClient, tmp_path: Path) -> None:
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path / 'other.db'}",
        "warehouse": f"file://{tmp_path / 'other'}",
    }
    client.create_table("elsewhere", SCHEMA)
    client.append("elsewhere", _rows(10))
    options = [f"{key}={value}" for key, value in properties.items()]

    done = _tier(
        client.endpoint,
        *("--once", "--table", "elsewhere", "--catalog", "other"),
        *(part for option in options for part in ("--catalog-property", option)),
    )

    assert done.returncode == 0, done.stderr
    assert _lake_rows(LakeCatalog(name="other", properties=properties), "elsewhere") == 10


def _lake_rows(described: LakeCatalog, table: str) -> int:
    catalog = load_catalog(described.name, **described.properties)
    try:
        return int(catalog.load_table(("default", table)).scan().to_arrow().num_rows)
    finally:
        catalog.close()


def _wait_until_tiered(client: StorageClient, path: str, rows: int) -> None:
    wait_until(
        lambda: _tiered(client, path) >= rows,
        lambda: f"{_tiered(client, path)} of {rows} rows are tiered",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_once_it_keeps_tables_fresh_until_a_signal(
    service: ServiceProcess, client: StorageClient, number: signal.Signals
) -> None:
    path = f"fresh_{number.name.lower()}"
    client.create_table(path, SCHEMA, properties={"table.datalake.freshness": "200ms"})
    with subprocess.Popen(
        [*_COMMAND, "--table", path, "--log-level", "debug"],
        env={**os.environ, "STREAMHOUSE_ENDPOINT": service.endpoint},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            for rows in (10, 20):
                client.append(path, _rows(10))
                _wait_until_tiered(client, path, rows)
            worker.send_signal(number)
            stdout, stderr = worker.communicate(timeout=60)
        finally:
            worker.kill()

    assert worker.returncode == 0, stderr
    assert stdout == ""
    assert f"event=round table=default.{path} kind=tiered rows=10" in stderr


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cr3t\n")
    token.chmod(0o600)
    arguments = ["--token-file", str(token)]
    with (
        ServiceProcess(tmp_path / "data", *arguments) as service,
        StorageClient(service.endpoint, token="s3cr3t") as client,
    ):
        client.create_table("t", SCHEMA)
        client.append("t", _rows(5))
        without = _tier(service.endpoint, "--once")
        with_file = _tier(service.endpoint, "--once", *arguments)
        client.append("t", _rows(5))
        with_variable = _tier(service.endpoint, "--once", STREAMHOUSE_TOKEN="s3cr3t")

        assert without.returncode == 1
        assert "token" in without.stderr
        assert with_file.returncode == with_variable.returncode == 0, with_variable.stderr
        assert _tiered(client, "t") == 10


def test_the_embedded_worker_tiers_and_stops_with_the_service(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path, "--tiering", "embedded") as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("t", SCHEMA, properties={"table.datalake.freshness": "200ms"})
        client.append("t", _rows(1_000))
        _wait_until_tiered(client, "t", 1_000)

        assert _lake_rows(client.lake_catalog(), "t") == 1_000
        assert service.terminate() == 0
        assert "Traceback" not in service.log_text()


def test_help_is_there_without_waiting_for_engines() -> None:
    program = (
        "import sys; sys.argv = ['streamhouse', 'tier', '--help'];"
        "from streamhouse.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in ('pyspark', 'pyiceberg') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert "--max-rows-per-round" in done.stdout
    assert done.stdout.strip().endswith("[]"), done.stderr
