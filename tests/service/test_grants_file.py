"""A grants file beside a running service: who gets in, who tiers, and what a change does."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import ForbiddenError, UnauthorizedError
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

ROWS = pa.table({"id": pa.array(range(100), pa.int64())})


def _write(path: Path, **tokens: str) -> None:
    """Write the file as one should: aside, then in its place."""
    entries = [
        f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(f"{name}-token".encode())}"\n'
        f"grants = [{grants}]\n"
        for name, grants in tokens.items()
    ]
    new = path.with_suffix(".new")
    new.write_text("".join(entries))
    new.chmod(0o600)
    new.replace(path)


def _client(service: ServiceProcess, name: str) -> StreamhouseClient:
    return StreamhouseClient(service.endpoint, token=f"{name}-token")


def _list_until_refused(client: StreamhouseClient) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client.list_tables()


def test_each_token_does_what_it_is_granted_until_the_file_changes(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    admin, worker = '"admin:*"', '"write:service", "read:default.*"'
    _write(grants, admin=admin, worker=worker, reader='"read:default.t"')
    arguments = (
        *("--grants", str(grants)),
        "--catalog-property=s3.secret-access-key=of-the-lake",
    )
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        with _client(service, "admin") as client:
            client.create_table("t", ROWS.schema)
            client.append("t", ROWS)
        with _client(service, "worker") as client:
            tier_once(client, "t", token="worker-token")
            with pytest.raises(ForbiddenError, match=r"no grant 'write:default\.t'"):
                client.append("t", ROWS)
        with _client(service, "reader") as client:
            # Nobody needs the lake's secrets where it opens without them.
            assert client.read("t$lake").num_rows == 100
            assert "of-the-lake" not in client.lake_catalog().properties.values()
            with pytest.raises(ForbiddenError, match="no grant 'write:service'"):
                StorageClient.of(client).claim_tiering("me")

            # The file is looked at every second, or when a loaded machine comes to it.
            grants.write_text("broken")
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                assert client.list_tables() == ["default.t"]
                if "event=grants_not_reloaded" in service.log_text():
                    break
            _write(grants, admin=admin)
            with pytest.raises(UnauthorizedError):
                _list_until_refused(client)
        log = service.log_text()
    assert "event=grants_not_reloaded" in log
    assert "event=grants_reloaded tokens=1" in log
    refused = [line for line in log.splitlines() if "event=refused" in line]
    assert all("request_id=" in line and "client=127.0.0.1" in line for line in refused)
    assert "token_name=reader" in refused[-2]
    assert "-token" not in log


def test_an_embedded_worker_needs_no_token_in_the_file(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    _write(grants, admin='"admin:*"')
    arguments = ("--grants", str(grants), "--tiering", "embedded")
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        with _client(service, "admin") as client:
            client.create_table("t", ROWS.schema, properties={"table.datalake.freshness": "1ms"})
            client.append("t", ROWS)
            while client.table_state("t").positions[0].tiered_offset < 100:
                client.table_state("t", after={0: 100}, max_wait_ms=100)
        assert "event=refused" not in service.log_text()


def test_a_broken_file_stops_the_start(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    grants.write_text("[[token]]\nname = 'a'\n")
    grants.chmod(0o600)

    with (
        pytest.raises(AssertionError, match="must have name, sha256 and grants"),
        ServiceProcess(tmp_path / "data", "--grants", str(grants)),
    ):
        pass
