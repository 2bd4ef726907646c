"""Confluent's serializers register schemas with the service, and tables follow them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from integration.judges.environment import judge_python
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("judges") / "kafka_registry.py"


@pytest.mark.parametrize("comes_first", ["schema", "topic"])
def test_what_confluents_serializers_write_they_read_and_the_table_has(
    tmp_path: Path, comes_first: str
) -> None:
    python = judge_python("kafka")
    with ServiceProcess(tmp_path, "--kafka-port", "0") as service:
        done = subprocess.run(
            [
                *(python, PROGRAM, service.kafka_address),
                *(f"{service.endpoint}/kafka/registry", comes_first),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4_000:]
        with StreamhouseClient(service.endpoint) as streamhouse:
            rows = streamhouse.read("orders").to_pylist()

    values = [
        {"id": n, "note": None, "kind": "a", "amount": None if n < 5 else n / 2} for n in range(8)
    ]
    assert sorted(map(json.loads, done.stdout.splitlines()), key=lambda v: v["id"]) == values
    found = [{name: row[name] for name in values[0]} for row in rows]
    assert sorted(found, key=lambda row: row["id"]) == values
