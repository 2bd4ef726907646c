"""The commands of docs/certificates.md, and a certificate that is replaced under load."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program"),
]

PAGE: Final = Path(__file__).parents[2] / "docs" / "certificates.md"
CA, NEW_PAIR, IN_PLACE, SERVE, END_DATE, SHOWN, TWO_CAS = re.findall(
    r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
)
SCHEMA: Final = pa.schema([("id", pa.int64())])


def _run(commands: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _run(CA + NEW_PAIR + IN_PLACE, tmp_path)
    return tmp_path


@pytest.fixture
def service(folder: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(
        folder / "data",
        *("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")),
        *("--tiering", "embedded"),
    ) as running:
        yield running


def _shown(service: ServiceProcess, folder: Path) -> str:
    """Return the certificate that a new connection is shown, if the CA has signed it."""
    parts = urlsplit(service.endpoint)
    address = (parts.hostname or "", parts.port or 0)
    return ssl.get_server_certificate(address, ca_certs=str(folder / "ca.pem"), timeout=60)


def _wait_for_line(service: ServiceProcess, text: str) -> None:
    wait_until(lambda: text in service.log_text(), text)


def test_the_commands_of_the_page_do_what_it_says(folder: Path, service: ServiceProcess) -> None:
    assert "notAfter=" in _run(END_DATE, folder)
    port = urlsplit(service.endpoint).port
    serial = _run(SHOWN.replace("8765", str(port)), folder)
    assert serial == _run("openssl x509 -in server.pem -noout -serial", folder)
    assert "streamhouse serve --data-dir data --tls-cert server.pem --tls-key server.key" in SERVE
    (folder / "new-ca.pem").write_text((folder / "ca.pem").read_text())
    _run(TWO_CAS, folder)
    with StreamhouseClient(service.endpoint, ca_file=str(folder / "both.pem")) as client:
        assert client.list_databases() == ["default"]


def test_a_certificate_is_replaced_while_a_client_writes(
    folder: Path, service: ServiceProcess
) -> None:
    """No call fails, open connections go on, and the worker inside the service does, too."""
    before = _shown(service, folder)
    rows = pa.table({"id": [1]}, schema=SCHEMA)
    with StreamhouseClient(service.endpoint, ca_file=str(folder / "ca.pem")) as old:
        old.create_table("t", SCHEMA, properties={"table.datalake.freshness": "1ms"})
        old.append("t", rows)

        _run(NEW_PAIR, folder)
        # Only half of the pair is in place: the old one is shown on.
        (folder / "server.key.new").replace(folder / "server.key")
        _wait_for_line(service, "event=certificate_not_reloaded")
        assert _shown(service, folder) == before
        old.append("t", rows)
        (folder / "server.pem.new").replace(folder / "server.pem")
        _wait_for_line(service, "event=certificate_reloaded")

        after = _shown(service, folder)
        assert after != before
        assert after.split() == (folder / "server.pem").read_text().split()
        old.append("t", rows)
        with StreamhouseClient(service.endpoint, ca_file=str(folder / "ca.pem")) as new:
            new.append("t", rows)
            # Enough for connections that the worker has not opened before.
            state = new.table_state("t")
            while state.positions[0].tiered_offset < 4:
                state = new.table_state("t", after={0: 4}, max_wait_ms=100)
    assert service.terminate() == 0
    assert "is not trusted" not in service.log_text()
    assert "Traceback" not in service.log_text()
