"""`streamhouse tables` and `top` over some of many tables, in an order, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli import cli
from tests.support.documented_fields import documented
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
ROWS = {"shop.a": 1, "shop.b": 30, "shop.c": 200, "log.z": 50}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("listing")
    with (
        ServiceProcess(folder) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        for database in ("shop", "log"):
            client.create_database(database)
        for name, count in ROWS.items():
            key = ["id"] if name == "shop.b" else []
            client.create_table(name, SCHEMA, bucket_count=1, primary_key=key)
            rows = pa.table({"id": range(count)}, schema=SCHEMA)
            (client.upsert if key else client.append)(name, rows)
        tier_once(client, "shop.c")
        yield service.endpoint


def _json(endpoint: str, *arguments: str) -> Any:
    done = CliRunner().invoke(cli, [*arguments, "--endpoint", endpoint, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def _names(lines: list[dict[str, Any]]) -> list[str]:
    return [line["table"] for line in lines]


def test_tables_are_a_document(endpoint: str) -> None:
    found = _json(endpoint, "tables")

    lines = {line["table"]: line for line in found["tables"]}
    assert found["not_served"] == []
    assert {name: line["row_count"] for name, line in lines.items()} == ROWS
    assert lines["shop.b"]["is_primary_key_table"]
    assert (lines["shop.c"]["lake_rows"], lines["shop.c"]["untiered_rows"]) == (200, 0)
    assert lines["log.z"]["untiered_rows"] == 50
    assert all(isinstance(line["lag_ms"], int) for line in lines.values() if line["is_tiered"])


def test_tables_are_chosen_and_ordered(endpoint: str) -> None:
    assert _names(_json(endpoint, "tables")["tables"]) == sorted(ROWS)
    by_rows = ["shop.c", "log.z", "shop.b", "shop.a"]
    assert _names(_json(endpoint, "tables", "--sort", "rows")["tables"]) == by_rows
    untiered = ["tables", "--filter", "shop.*", "--sort", "untiered"]
    assert _names(_json(endpoint, *untiered)["tables"]) == ["shop.b", "shop.a", "shop.c"]
    either = ["tables", "--filter", "*.a", "--filter", "log.*"]
    assert _names(_json(endpoint, *either)["tables"]) == ["log.z", "shop.a"]
    assert _json(endpoint, "tables", "--filter", "no.*")["tables"] == []


def test_one_table_is_a_document(endpoint: str) -> None:
    found = _json(endpoint, "tables", "shop.c")

    assert [column["name"] for column in found["schema"]] == ["id"]
    assert [bucket["high_watermark"] for bucket in found["buckets"]] == [200]


def test_sizes_are_a_document(endpoint: str) -> None:
    lines = {line["table"]: line for line in _json(endpoint, "tables", "--sizes")["tables"]}

    assert lines["shop.c"]["lake_rows"] == 200
    assert lines["shop.c"]["cold_bytes"] > 0
    assert lines["shop.a"]["cold_bytes"] == 0
    assert lines["shop.a"]["lake_to_log_ratio"] is None
    assert list(lines["shop.a"]) == documented("tables --sizes")
