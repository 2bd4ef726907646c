"""`streamhouse serve` as users start and stop it."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.cli.tuned_malloc import TUNED_MALLOC
from streamhouse.client import StorageClient
from streamhouse.core.errors import UnauthorizedError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow


def _started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a service that must refuse to start."""
    return subprocess.run(
        [sys.executable, "-c", "from streamhouse.cli import main; main()", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _refused(*arguments: str) -> str:
    """Start a service that must refuse to start; return its one line on stderr."""
    done = _started(*arguments)
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


def test_it_says_where_it_listens_and_serves_there(tmp_path: Path) -> None:
    with (
        ServiceProcess(tmp_path / "data", is_executed=True) as service,
        StorageClient(service.endpoint) as client,
    ):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", service.endpoint)
        assert client.list_databases() == ["default"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_with_code_0_and_no_complaint(
    tmp_path: Path, number: signal.Signals
) -> None:
    with ServiceProcess(tmp_path, is_executed=True) as service:
        assert service.stop_with(number) == 0
        assert "level=error" not in service.log_text()
        assert "level=warning" not in service.log_text()
        assert "Traceback" not in service.log_text()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is tuned")
def test_it_replaces_itself_with_malloc_tuned_before_it_does_anything(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, is_executed=True) as service:
        variables = Path(f"/proc/{service.pid}/environ").read_text().split("\0")
        assert {f"{name}={value}" for name, value in TUNED_MALLOC.items()} <= set(variables)


@pytest.mark.parametrize("option", ["--token-file", "--grants", "--tls-key"])
def test_a_secret_file_that_others_may_read_is_refused(tmp_path: Path, option: str) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    file.chmod(0o640)
    arguments = [option, str(file)]
    if option == "--tls-key":
        arguments += ["--tls-cert", str(file)]

    line = _refused("--data-dir", str(tmp_path / "data"), *arguments)

    assert f"file {file} may be read or written by others" in line
    assert line.endswith("(mode 640); chmod 600 it")


def test_secrets_of_the_catalog_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    """What the process list shows has none; nobody else may look into the data directory."""
    file = tmp_path / "secret"
    file.write_text("from-a-file\n")
    file.chmod(0o600)
    data = tmp_path / "data"
    arguments = (
        f"--catalog-property=s3.secret-access-key=@file:{file}",
        "--catalog-property=s3.access-key-id=@env:LAKE_KEY",
    )
    with ServiceProcess(data, *arguments, env={**os.environ, "LAKE_KEY": "from-env"}) as service:
        shown = Path(f"/proc/{service.pid}/cmdline").read_bytes()
        assert b"from-" not in shown
        with StorageClient(service.endpoint) as client:
            properties = client.lake_catalog().properties
        assert properties["s3.secret-access-key"] == "from-a-file"
        assert properties["s3.access-key-id"] == "from-env"
        assert data.stat().st_mode & 0o777 == 0o700
        assert "level=warning" not in service.log_text()


def test_a_data_directory_that_others_may_read_is_closed_and_that_is_said(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    with ServiceProcess(data) as service:
        assert data.stat().st_mode & 0o777 == 0o700
        assert "event=data_directory_closed" in service.log_text()
        assert "mode_before=755" in service.log_text()


def test_a_second_service_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        line = _refused("--data-dir", str(tmp_path), "--port", "0")

        assert line == (
            f"streamhouse: data directory {tmp_path} is in use by another streamhouse service"
            f" (process {service.pid}); stop it, or use another --data-dir"
        )


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        line = _refused("--data-dir", str(tmp_path), "--port", str(port))

    assert line.startswith(f"streamhouse: cannot listen on 127.0.0.1 port {port}: Address already")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "host '0.0.0.0' is reachable from other machines: give --token-f"),
        (["--token-file", "nope"], "token file nope cannot be read"),
        (["--catalog-property", "uri"], "--catalog-property 'uri' must be KEY=VALUE"),
    ],
)
def test_a_wrong_option_is_one_clear_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert _refused("--data-dir", str(tmp_path), *arguments).startswith(f"streamhouse: {message}")


def test_a_value_that_cannot_be_read_is_refused_as_an_option_that_there_is_not(
    tmp_path: Path,
) -> None:
    done = _started("--data-dir", str(tmp_path), "--tables-max", "many")

    assert done.returncode == 2, done
    assert done.stderr.endswith("\nError: --tables-max = 'many' must be a number of tables\n")
    assert done.stdout == ""


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    (tmp_path / "token").chmod(0o600)

    line = _refused("--data-dir", str(tmp_path), "--token-file", str(tmp_path / "token"))

    assert line.endswith("must hold one token without spaces")


def test_no_secret_is_in_a_log_of_json(tmp_path: Path) -> None:
    """At debug, with every secret that a service may have, and callers with wrong ones."""
    token_file = tmp_path / "token"
    token_file.write_text("hush-token\n")
    token_file.chmod(0o600)
    with (
        ServiceProcess(
            tmp_path / "data",
            *("--token-file", str(token_file), "--log-level", "debug", "--log-format", "json"),
            *("--tiering", "embedded", "--catalog-property", "s3.session-token=hush-s3"),
        ) as service,
        StorageClient(service.endpoint, token="hush-token") as client,
        StorageClient(service.endpoint, token="hush-wrong") as stranger,
    ):
        client.create_table(
            "t", pa.schema([("text", pa.string())]), properties={"table.datalake.freshness": "1ms"}
        )
        client.append("t", pa.table({"text": ["hush-row"]}))
        state = client.table_state("t")
        while state.positions[0].tiered_offset < 1:
            state = client.table_state("t", after={0: 1}, max_wait_ms=100)
        with pytest.raises(UnauthorizedError):
            stranger.list_tables()
        text = service.log_text()

    lines = [json.loads(line) for line in text.splitlines()]
    assert {"time", "level", "logger"} <= set.intersection(*(set(line) for line in lines))
    assert {"rounds", "round", "secret_on_command_line"} <= {line.get("event") for line in lines}
    assert "hush" not in text


def test_with_a_token_only_its_holders_get_in_and_it_is_never_logged(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret-token\n")
    token_file.chmod(0o600)
    with ServiceProcess(
        tmp_path / "data", "--token-file", str(token_file), "--log-level", "debug"
    ) as service:
        with StorageClient(service.endpoint, token="s3cret-token") as client:
            assert client.list_tables() == []
        with (
            StorageClient(service.endpoint, token="wrong-token") as client,
            pytest.raises(UnauthorizedError, match="the bearer token is wrong"),
        ):
            client.list_tables()

        log = service.log_text()
        assert "route=list_tables status=200" in log
        assert "code=unauthorized" in log
        assert "-token" not in log


def test_options_reach_the_service(tmp_path: Path) -> None:
    with (
        ServiceProcess(
            tmp_path,
            "--catalog",
            "mine",
            "--catalog-property",
            "type=rest",
            "--catalog-property",
            "uri=http://lake/?a=b",
        ) as service,
        StorageClient(service.endpoint) as client,
    ):
        catalog = client.lake_catalog()
        assert catalog.name == "mine"
        assert {"type": "rest", "uri": "http://lake/?a=b"}.items() <= catalog.properties.items()
