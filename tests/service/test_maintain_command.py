"""`streamhouse maintain` against a real service: a dry run, the work, and what readers see."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from streamhouse.cli import cli
from streamhouse.cli.client_commands.maintain import command
from streamhouse.client import StorageClient, TieringIdle
from streamhouse.core.errors import NotFoundError, UnavailableError
from tests.support.documented_fields import documented
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as opened:
        yield opened


def _maintain(client: StorageClient, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--endpoint", client.endpoint])


def _fill(client: StorageClient, path: str, *, rounds: int) -> None:
    properties = {
        "table.datalake.snapshot.max-age": "1ms",
        "table.datalake.snapshot.min-count": "1",
        "table.datalake.auto-maintenance": "false",
    }
    client.create_table(path, SCHEMA, properties=properties)
    for number in range(rounds):
        ids = range(number * 10, number * 10 + 10)
        client.append(path, pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA))
        tier_once(client, path)


def test_full_history_and_batch_layout_are_tidied_too(client: StorageClient) -> None:
    properties = {
        "table.datalake.changelog": "true",
        "table.datalake.batch-layout.sort": "name, id",
        "table.datalake.auto-maintenance": "false",
    }
    client.create_table("orders", SCHEMA, primary_key=["id"], properties=properties)
    for name in ("a", "b", "c"):
        client.upsert("orders", pa.table({"id": [1, 2], "name": [name, name]}, schema=SCHEMA))
        tier_once(client, "orders")

    planned = _maintain(client, "orders", "--dry-run")
    assert "default.orders: 3 data files" in planned.output
    assert "default.orders$changelog: 3 data files" in planned.output
    assert "default.orders$batch: 3 data files" in planned.output

    done = _maintain(client, "orders")
    assert done.exception is None, done.output
    assert "default.orders$changelog: 3 files became 1" in done.output
    history = _lake_table(client, "orders$changelog")
    assert len(history.scan().to_arrow()) == 2 + 4 + 4
    layout = _lake_table(client, "orders$batch")
    assert len(layout.inspect.files()) == 1
    assert sorted(layout.scan().to_arrow()["id"].to_pylist()) == [1, 2]
    state = client.table_state("orders").lake
    for known, table in ((state.changelog, history), (state.batch, layout)):
        assert known is not None
        assert known.snapshot_id == table.metadata.current_snapshot_id


def test_the_claim_is_given_back_when_the_lake_cannot_be_opened(client: StorageClient) -> None:
    _fill(client, "moved", rounds=1)
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    catalog.rename_table("default.moved", "default.elsewhere")

    refused = _maintain(client, "moved")

    assert isinstance(refused.exception, NotFoundError)
    assert "'default.moved' is not in catalog" in refused.exception.message
    claim = client.claim_tiering("worker", tables=["moved"], force=True, include_idle=True)
    assert not isinstance(claim, TieringIdle)


def _lake_table(client: StorageClient, path: str) -> Table:
    catalog = client.lake_catalog()
    return load_catalog(catalog.name, **catalog.properties).load_table(f"default.{path}")


def test_a_table_is_tidied_on_demand(client: StorageClient) -> None:
    _fill(client, "events", rounds=3)

    planned = _maintain(client, "events", "--dry-run")
    assert planned.exception is None, planned.output
    assert "3 data files" in planned.output
    assert "rewrite 3 files into about 1" in planned.output
    assert len(_lake_table(client, "events").metadata.snapshots) == 3

    done = _maintain(client, "default.events")
    assert done.exception is None, done.output
    assert "3 files became 1" in done.output
    # The snapshot before it was current a moment ago, which is longer than a millisecond.
    assert "snapshots expired" in done.output
    table = _lake_table(client, "events")
    assert len(table.inspect.files()) == 1
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(30))
    state = client.table_state("events")
    assert state.lake.snapshot_id == table.metadata.current_snapshot_id
    assert state.positions[0].tiered_offset == 30

    with urllib.request.urlopen(f"{client.endpoint}/v1/tiering") as answer:
        debt = json.load(answer)["tables"]["default.events"]["maintenance_debt"]
    assert (debt["data_files"], debt["small_files"], debt["maintenance_error"]) == (1, 1, "")
    assert debt["maintained_at_us"] > 0

    assert "nothing to do" in _maintain(client, "events").output
    client.append("events", pa.table({"id": [30], "name": ["x"]}, schema=SCHEMA))
    assert tier_once(client, "events") == 1


def test_programs_read_a_document_a_line(client: StorageClient) -> None:
    def lines(*arguments: str) -> list[dict[str, Any]]:
        done = CliRunner().invoke(cli, [*arguments, "--json", "--endpoint", client.endpoint])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    client.create_table("json", SCHEMA)
    reason = "no row of it is in the lake yet"
    assert lines("maintain", "json") == [{"table": "default.json", "nothing_to_do": reason}]
    _fill(client, "jsons", rounds=2)
    client.append("jsons", pa.table({"id": [20], "name": ["x"]}, schema=SCHEMA))

    (tiered,) = lines("tier", "--once", "--table", "jsons")
    (planned,) = lines("maintain", "jsons", "--dry-run")
    done = lines("maintain", "jsons")

    assert list(tiered) == documented("tier --once")
    assert (tiered["table"], tiered["row_count"], tiered["error"]) == ("default.jsons", 1, None)
    assert list(planned) == documented("maintain --dry-run")
    assert (planned["files"], planned["files_to_rewrite"]) == (3, 3)
    assert list(done[0]) == documented("maintain")
    assert (done[0]["files_before"], done[0]["files_after"]) == (3, 1)
    assert sum(line["expired_snapshots"] for line in done) > 0
    (again,) = lines("maintain", "jsons")
    assert (again["files_before"], again["has_more"]) == (0, False)
    refused = CliRunner().invoke(cli, ["tier", "--json", "--endpoint", client.endpoint])
    assert "--json is for the summaries of --once" in refused.output


@pytest.mark.parametrize("count", [70, pytest.param(1_500, marks=pytest.mark.long)])
def test_small_files_that_are_alone_in_their_partitions_are_explained(
    client: StorageClient, count: int
) -> None:
    properties = {"table.datalake.auto-maintenance": "false"}
    name = f"days_{count}"
    client.create_table(name, SCHEMA, partitioned_by=["id"], properties=properties)
    client.append(name, pa.table({"id": range(count), "name": ["x"] * count}, schema=SCHEMA))
    tier_once(client, name)

    why = f"{count:,} small files, each the only one of its partition and bucket"
    assert f"  leave {why}" in _maintain(client, name, "--dry-run").output
    assert f"default.{name}: nothing to do; left are {why}" in _maintain(client, name).output
    client.append(name, pa.table({"id": range(5), "name": ["y"] * 5}, schema=SCHEMA))
    tier_once(client, name)
    done = _maintain(client, name)
    assert "10 files became 5" in done.output
    assert f"left are {count:,} small files" in done.output


def test_a_table_that_a_worker_has_is_left_to_it(client: StorageClient) -> None:
    _fill(client, "busy", rounds=1)
    client.append("busy", pa.table({"id": [10], "name": ["x"]}, schema=SCHEMA))
    claim = client.claim_tiering("worker", tables=["busy"], force=True)
    assert not isinstance(claim, TieringIdle)

    refused = _maintain(client, "busy")

    assert isinstance(refused.exception, UnavailableError)
    assert "cannot be maintained now: leased" in refused.exception.message


def test_a_table_that_was_never_tiered_has_nothing_to_maintain(client: StorageClient) -> None:
    client.create_table("fresh", SCHEMA)
    for arguments in (["fresh"], ["fresh", "--dry-run"]):
        done = _maintain(client, *arguments)
        assert done.exit_code == 0
        assert done.output == ("default.fresh: nothing to do, no row of it is in the lake yet\n")


def test_all_tables_are_maintained_and_those_that_match(client: StorageClient) -> None:
    client.create_database("shop")
    for path in ("shop.a", "shop.b", "other"):
        _fill(client, path, rounds=2)
    client.create_table("shop.untiered", SCHEMA)
    client.append("shop.b", pa.table({"id": [50], "name": ["x"]}, schema=SCHEMA))
    claim = client.claim_tiering("worker", tables=["shop.b"], force=True)
    assert not isinstance(claim, TieringIdle)

    done = _maintain(client, "shop.*")
    lines = done.output.splitlines()
    assert lines[0].startswith("shop.a: 2 files became 1")
    assert lines[1] == "shop.untiered: nothing to do, no row of it is in the lake yet"
    assert lines[2].startswith("shop.b: table 'shop.b' cannot be maintained now: leased")
    assert (len(lines), done.exit_code) == (3, 1)

    table_id = claim.state.table.table_id
    client.fail_tiering("shop.b", table_id=table_id, epoch=claim.epoch, error="given back")
    # Others' tables are there, too, and one of them may be leased.
    lines = _maintain(client).output.splitlines()
    ours = [line for line in lines if line.startswith(("default.other", "shop."))]
    assert [line.split(":")[0] for line in ours] == [
        "default.other",
        "shop.a",
        "shop.b",
        "shop.untiered",
    ]
    assert "2 files became 1" in ours[0]
    assert "nothing to do" in ours[1]
    assert "2 files became 1" in ours[2]
    assert _maintain(client, "other", "shop.*").exit_code == 0

    refused = _maintain(client, "shop.*", "nowhere.*")
    assert isinstance(refused.exception, NotFoundError)
    assert refused.exception.message.startswith("there is no table 'nowhere.*'")
