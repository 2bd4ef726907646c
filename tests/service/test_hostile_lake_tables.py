"""What was done to a service through the tables of its catalog: code, endpoints, files of others.

Each attack is as it was seen to work, over HTTP, with a token that may write one table.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.hostile_metadata import HOSTILE_PROPERTIES, assert_create, rewrite_metadata
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

OWNER, WRITER = "the-token-of-the-owner", "the-token-of-a-writer"
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
SCHEMA_JSON = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "id", "required": False, "type": "long"}],
}


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """Where requests of the service would arrive that a table sends there."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        opened.setblocking(False)
        yield opened


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "token").write_text(OWNER)
    digest = hashlib.sha256(WRITER.encode()).hexdigest()
    (folder / "grants.toml").write_text(
        f'[[token]]\nname = "writer"\nsha256 = "{digest}"\ngrants = ["write:db.t", "write:own.*"]\n'
    )
    for name in ("token", "grants.toml"):
        (folder / name).chmod(0o600)
    arguments = ("--token-file", str(folder / "token"), "--grants", str(folder / "grants.toml"))
    secrets = {"AWS_ACCESS_KEY_ID": "key-of-service", "AWS_SESSION_TOKEN": "session-of-service"}
    environment = {**os.environ, **secrets, "AWS_SECRET_ACCESS_KEY": "secret-of-service"}
    with ServiceProcess(folder / "data", *arguments, env=environment) as started:
        started.folder = folder  # type: ignore[attr-defined]  # for the tests of this file
        with StreamhouseClient(started.endpoint, token=OWNER) as client:
            client.create_database("db")
            client.create_database("own")
        _call(started, "POST", "namespaces", {"namespace": ["db"]}, token=OWNER)
        _call(started, "POST", "namespaces", {"namespace": ["own"]}, token=OWNER)
        yield started


def _call(
    service: ServiceProcess, method: str, path: str, body: Any = None, *, token: str = WRITER
) -> tuple[int, str]:
    """Status and text of one request to the catalog."""
    answer = urllib3.request(
        method,
        f"{service.endpoint}/iceberg/v1/{path}",
        headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        body=None if body is None else json.dumps(body),
        timeout=60,
        retries=False,
    )
    return answer.status, answer.data.decode()


def _folder(service: ServiceProcess) -> Path:
    return Path(service.folder)  # type: ignore[attr-defined]


def _creation(location: str | None, **properties: str) -> dict[str, Any]:
    body = {"name": "x", "schema": SCHEMA_JSON, "properties": properties}
    return body if location is None else {**body, "location": location}


def test_no_request_makes_the_service_run_what_it_says(service: ServiceProcess) -> None:
    proof = _folder(service) / "proof"
    code = f"__import__('pathlib').Path({str(proof)!r}).write_text('in') or 1"
    free = f"file://{_folder(service)}/data/lake/warehouse/db/t"
    evil = {"write.py-location-provider.impl": "builtins.eval"}

    for path, body in (
        ("namespaces/own/tables", _creation(code, **evil)),
        ("namespaces/own/tables", {**_creation(code, **evil), "stage-create": True}),
        ("namespaces/own/tables", _creation(None, **{"py-io-impl": "builtins.eval"})),
        ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, code, **evil)),
        ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, free, **evil)),
        (
            "namespaces/db/tables/t",
            assert_create(SCHEMA_JSON, free, **{"py-io-impl": "builtins.eval"}),
        ),
    ):
        status, text = _call(service, "POST", path, body)
        assert status == 403, text
        assert "must not" in text

    assert not proof.exists()


def test_no_table_sends_the_services_requests_elsewhere(
    service: ServiceProcess, listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    there = {"s3.endpoint": f"http://127.0.0.1:{port}", "s3.path-style-access": "true"}

    for path, body in (
        ("namespaces/own/tables", _creation("s3://bucket/x", **there)),
        ("namespaces/own/tables", _creation("s3://bucket/x")),
        ("namespaces/own/tables", _creation(f"http://127.0.0.1:{port}/x")),
        ("namespaces/own/tables", _creation(None, **there)),
        ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, "s3://bucket/x", **there)),
        ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, f"hdfs://127.0.0.1:{port}/x")),
    ):
        status, text = _call(service, "POST", path, body)
        assert status == 403, text

    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_registration_reads_no_file_out(service: ServiceProcess) -> None:
    _, missing = _call(service, "POST", "namespaces/own/register", token=OWNER, body=_register("x"))
    for path in (f"{_folder(service)}/token", "/etc/passwd", f"{_folder(service)}/data"):
        status, text = _call(
            service, "POST", "namespaces/own/register", _register(path), token=OWNER
        )
        assert status == 403, text
        assert OWNER not in text
        assert "root:" not in text
        assert text == missing


def _register(path: str) -> dict[str, str]:
    return {"name": "r", "metadata-location": f"file:///no/{path}" if path == "x" else path}


def test_no_table_lies_in_the_data_directory(service: ServiceProcess) -> None:
    data = _folder(service) / "data"
    before = sorted(data.iterdir())

    for location in (data, data / "tables" / "x", data / "lake", data / "lake" / "warehouse"):
        for place in (f"file://{location}", str(location)):
            status, text = _call(service, "POST", "namespaces/own/tables", _creation(place))
            assert status == 403, text

    assert sorted(data.iterdir()) == before


def test_a_table_that_came_in_behind_the_services_back_enters_nobody(
    service: ServiceProcess, listener: socket.socket
) -> None:
    """The worker and the reader of this process, and the service itself."""
    with StreamhouseClient(service.endpoint, token=OWNER) as client:
        client.create_table("db.t", SCHEMA)
        client.append("db.t", pa.table({"id": range(10)}, schema=SCHEMA))
        assert tier_once(client, "db.t", token=OWNER) == 10
        port = listener.getsockname()[1]
        proof = _folder(service) / "proof"
        database = _folder(service) / "data" / "lake" / "catalog.db"
        for hostile in (
            {**HOSTILE_PROPERTIES, "s3.endpoint": f"http://127.0.0.1:{port}"},
            {"py-io-impl": "no.such.Module"},
        ):
            rewrite_metadata(database, "db.t", lambda v, h=hostile: v["properties"].update(h))

            assert sorted(client.read("db.t")["id"].to_pylist()) == list(range(10))
            status, text = _call(service, "GET", "namespaces/db/tables/t")
            assert status == 200
            assert not hostile.keys() & json.loads(text)["metadata"]["properties"].keys()

        client.append("db.t", pa.table({"id": range(10, 20)}, schema=SCHEMA))
        assert tier_once(client, "db.t", token=OWNER) == 10
        assert sorted(client.read("db.t")["id"].to_pylist()) == list(range(20))
        assert not proof.exists()

        # A reader believes no file of others.
        def spoil(value: dict[str, Any]) -> None:
            for snapshot in value["snapshots"]:
                snapshot["manifest-list"] = "file:///etc/passwd"

        rewrite_metadata(database, "db.t", spoil)
        with pytest.raises(StreamhouseError, match="does not lie below the table's location"):
            client.read("db.t")
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_table_of_others_keeps_its_files(service: ServiceProcess) -> None:
    uri = f"{service.endpoint}/iceberg"
    owner = load_catalog("owner", type="rest", uri=uri, token=OWNER)
    victim = owner.create_table("own.victim", SCHEMA)
    victim.append(pa.table({"id": range(5)}, schema=SCHEMA))
    attacker = load_catalog("attacker", type="rest", uri=uri, token=WRITER)
    mine = attacker.create_table("own.mine", SCHEMA)
    (task,) = victim.scan().plan_files()

    with pytest.raises(Exception, match="does not lie below the table's location"):
        mine.add_files([task.file.file_path])
    owner.purge_table("own.mine")

    assert owner.load_table("own.victim").scan().to_arrow().num_rows == 5
