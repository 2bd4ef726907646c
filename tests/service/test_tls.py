"""HTTPS from end to end: who is trusted, who is not, and that everything works over it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import CA_VARIABLE
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
)
from streamhouse.storage_service.server.http.tls import certificate_fingerprint
from tests.support.certificates import Certificates, make_certificates
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

ROWS = pa.table({"id": pa.array(range(50_000), pa.int64())})


def _tls(made: Certificates) -> tuple[str, ...]:
    return ("--tls-cert", str(made.certificate), "--tls-key", str(made.key))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), host="IP:127.0.0.1")


@pytest.fixture(scope="module")
def service(
    made: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("data"), *_tls(made)) as running:
        yield running


def test_rows_go_there_and_back(service: ServiceProcess, made: Certificates) -> None:
    assert service.endpoint.startswith("https://127.0.0.1:")
    with StreamhouseClient(service.endpoint, ca_file=str(made.ca)) as client:
        client.create_table("t", ROWS.schema)
        client.append("t", ROWS)
        follower = client.subscribe("t", start="earliest")

        assert next(follower).data["id"][0].as_py() == 0
        assert client.read("t").num_rows == ROWS.num_rows


def test_the_variable_names_the_ca_too(
    service: ServiceProcess, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CA_VARIABLE, str(made.ca))
    with StreamhouseClient(service.endpoint) as client:
        assert client.list_databases() == ["default"]


def test_the_very_certificate_may_be_named(service: ServiceProcess, made: Certificates) -> None:
    fingerprint = certificate_fingerprint(made.certificate)
    with StreamhouseClient(f"{service.endpoint}#sha256={fingerprint}") as client:
        assert client.list_databases() == ["default"]
    with (
        StreamhouseClient(f"{service.endpoint}#sha256={'0' * 64}") as client,
        pytest.raises(InvalidRequestError, match="is not trusted"),
    ):
        client.list_databases()


def test_a_service_nobody_vouches_for_is_not_trusted(
    service: ServiceProcess, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path, host="IP:127.0.0.1")
    for options in ({}, {"ca_file": str(other.ca)}):
        with (
            StreamhouseClient(service.endpoint, **options) as client,
            pytest.raises(InvalidRequestError, match=r"is not trusted.*STREAMHOUSE_CA_FILE"),
        ):
            client.list_databases()


def test_a_certificate_for_another_host_is_not_trusted(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls", host="DNS:elsewhere.example")
    with (
        ServiceProcess(tmp_path / "data", *_tls(made)) as service,
        StreamhouseClient(service.endpoint, ca_file=str(made.ca)) as client,
        pytest.raises(InvalidRequestError, match=r"is for another name.*use a name of the cert"),
    ):
        client.list_databases()


def test_plain_http_and_tls_do_not_meet(service: ServiceProcess, tmp_path: Path) -> None:
    with (
        StreamhouseClient(service.endpoint.replace("https", "http")) as client,
        pytest.raises(InvalidRequestError, match="speaks TLS: write https:// instead"),
    ):
        client.list_databases()
    with (
        ServiceProcess(tmp_path) as plain,
        StreamhouseClient(plain.endpoint.replace("http", "https")) as client,
        pytest.raises(InvalidRequestError, match="does not speak TLS"),
    ):
        client.list_databases()


def test_a_protected_key_and_the_embedded_worker(tmp_path: Path) -> None:
    """The certificate names a host that is not the address the worker calls its own service by."""
    made = make_certificates(tmp_path / "tls", host="DNS:lake.example", key_password="pass-word")
    password = tmp_path / "password"
    password.write_text("pass-word\n")
    password.chmod(0o600)
    arguments = (*_tls(made), "--tls-key-password-file", str(password), "--tiering", "embedded")
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        endpoint = f"{service.endpoint}#sha256={certificate_fingerprint(made.certificate)}"
        with StreamhouseClient(endpoint) as client:
            client.create_table("t", ROWS.schema, properties={"table.datalake.freshness": "1ms"})
            client.append("t", ROWS)
            state = client.table_state("t")
            while state.positions[0].tiered_offset < ROWS.num_rows:
                state = client.table_state("t", after={0: ROWS.num_rows}, max_wait_ms=100)
        assert "pass-word" not in service.log_text()


def test_a_wrong_key_is_said_at_the_start(tmp_path: Path) -> None:
    one = make_certificates(tmp_path / "one", host="IP:127.0.0.1")
    two = make_certificates(tmp_path / "two", host="IP:127.0.0.1")
    mixed = Certificates(one.ca, one.certificate, two.key)

    with (
        pytest.raises(AssertionError, match=r"cannot\s+be used: .*KEY_VALUES_MISMATCH"),
        ServiceProcess(tmp_path / "data", *_tls(mixed)),
    ):
        raise StreamhouseError("it started")


def test_connections_that_never_shake_hands_lock_nobody_out(
    tmp_path: Path, made: Certificates
) -> None:
    """They count from their first packet on, and the one idle for longest makes room."""
    arguments = ("--connections-max", "20")
    with (
        ServiceProcess(tmp_path, *_tls(made), *arguments) as service,
        contextlib.ExitStack() as stack,
    ):
        parts = urlsplit(service.endpoint)
        files = Path(f"/proc/{service.pid}/fd")
        before = len(list(files.iterdir()))
        for number in range(100):
            silent = socket.create_connection((parts.hostname, parts.port or 0), 60)
            stack.enter_context(silent)
            if number % 2:
                silent.sendall(b"\x16\x03\x01\x02")
        with StreamhouseClient(service.endpoint, ca_file=str(made.ca)) as client:
            client.create_table("t", ROWS.schema)
            client.append("t", ROWS)
            assert client.read("t").num_rows == ROWS.num_rows
        assert len(list(files.iterdir())) < before + 60
        assert service.terminate() == 0
        assert "Traceback" not in service.log_text()
        assert "level=error" not in service.log_text()
