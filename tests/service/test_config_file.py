"""A service whose options are in the environment and in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamhouse.client import StorageClient
from tests.support.command_line import streamhouse
from tests.support.service_process import DiedAtStart, ServiceProcess

pytestmark = pytest.mark.slow


def test_a_service_does_what_environment_and_file_say(tmp_path: Path) -> None:
    config = tmp_path / "streamhouse.toml"
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    config.write_text(f'[serve]\ntoken-file = "{token}"\ntables-max = 1\nport = "no port"\n')
    environment = {
        **os.environ,
        "STREAMHOUSE_CONFIG": str(config),
        "STREAMHOUSE_SERVE_TIERING": "embedded",
    }

    refused = streamhouse("serve", "--data-dir", tmp_path / "data", env=environment, expect=1)
    config.write_text(config.read_text().replace('"no port"', "1"))
    with (
        # Its --port is on the command line, which comes first.
        ServiceProcess(tmp_path / "data", env=environment) as service,
        StorageClient(service.endpoint, token="s3cret") as client,
    ):
        assert client.list_databases() == ["default"]
        listed = streamhouse(
            "tables",
            env={
                **environment,
                "STREAMHOUSE_TABLES_ENDPOINT": service.endpoint,
                "STREAMHOUSE_TOKEN": "s3cret",
            },
        )

    assert "[serve], port: 'no port' is not a valid integer" in refused.stderr
    assert listed.returncode == 0


def test_shards_are_told_by_the_file_of_their_supervisor(tmp_path: Path) -> None:
    """They read it, too, and are no supervisors of shards of their own."""
    config = tmp_path / "streamhouse.toml"
    config.write_text(
        f"""
        [serve]
        shards = 2
        journal = "file://{tmp_path}/journal"
        warehouse = "file://{tmp_path}/lake"
        tables-max = 7
        """
    )
    with (
        ServiceProcess(tmp_path / "data", "--config", str(config)) as service,
        StorageClient(service.endpoint) as client,
    ):
        assert [found["shard"] for found in client.shards()] == ["0", "1"]
        assert client.lake_catalog().properties["warehouse"] == f"file://{tmp_path}/lake"


def test_properties_that_shards_would_not_have_are_refused(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "STREAMHOUSE_SERVE_CATALOG_PROPERTY": "s3.region=eu-1",
        "STREAMHOUSE_SERVE_SHARDS": "2",
        "STREAMHOUSE_SERVE_JOURNAL": f"file://{tmp_path}/journal",
    }

    with (
        pytest.raises(DiedAtStart, match="--shards without a catalog takes --catalog-property"),
        ServiceProcess(tmp_path / "data", env=environment),
    ):
        pass
