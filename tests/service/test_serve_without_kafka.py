"""`serve` without `--kafka-port` loads nothing of the Kafka room, which need not be installed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse import StreamhouseClient
from tests.support.registry_world import ORDER
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

# The interpreter cannot import the room or its libraries, and lists its modules at the end.
_PROGRAM = """
import atexit, os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("streamhouse.storage_service.kafka", "kio", "pyruhvro")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())

def list_modules():
    with open(os.environ["LOADED_MODULES"], "w") as file:
        file.write("\\n".join(sys.modules))

atexit.register(list_modules)
from streamhouse.cli import main
main()
"""


def _ask(service: ServiceProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        service.endpoint + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_service_without_kafka_loads_none_of_it_and_keeps_the_schemas(tmp_path: Path) -> None:
    data, loaded = tmp_path / "data", tmp_path / "loaded"
    subject = "/kafka/registry/subjects/orders-value/versions"
    with ServiceProcess(data, "--kafka-port", "0") as service:
        schema = {"schema": json.dumps(ORDER)}
        registered = _ask(service, "POST", subject, schema)
        assert registered[0] == 200
        service.terminate()

    command = ("-c", _PROGRAM, "serve")
    env = {"LOADED_MODULES": str(loaded)}
    with ServiceProcess(data, command=command, env=env, is_executed=True) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.append("orders", pa.table({"id": [1], "note": ["first"]}))
            assert client.read("orders").num_rows == 1
        assert _ask(service, "GET", "/iceberg/v1/config")[0] == 200
        status, answer = _ask(service, "GET", subject)
        assert status == 404
        assert "served with --kafka-port" in answer["error"]["message"]
        assert service.terminate() == 0

    modules = loaded.read_text().split()
    assert "streamhouse.storage_service.server.listener" in modules
    rooms = ("streamhouse.storage_service.kafka", "kio", "pyruhvro")
    assert not [name for name in modules if name.startswith(rooms)]
    with ServiceProcess(data, "--kafka-port", "0") as service:
        assert _ask(service, "POST", subject, schema) == registered
