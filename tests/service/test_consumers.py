"""Where readers stand, against a real service: named subscriptions, the command, a restart."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.cli.consumers import command
from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.errors import InvalidRequestError
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TABLE = "default.t"


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


def _standing(client: StreamhouseClient) -> dict[str, tuple[dict[str, int], int]]:
    found = client.consumers(TABLE)
    return {one["name"]: (one["offsets"], one["lag_rows"]) for one in found}


def _shown(service: ServiceProcess, *arguments: str) -> list[list[str]]:
    given = [*arguments, "--endpoint", service.endpoint]
    shown = CliRunner().invoke(command, given, env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    return [line.split() for line in shown.output.splitlines()]


def test_a_named_subscription_is_shown_kept_over_a_kill_and_forgotten(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table(TABLE, SCHEMA)
            assert _shown(service) == [["no", "reader", "has", "reported", "its", "position"]]
            client.append(TABLE, _rows(0, 10))
            client.append(TABLE, _rows(10, 30))
            batches = client.subscribe(TABLE, start="earliest", consumer="billing")
            with contextlib.closing(batches):  # type: ignore[type-var]
                read = sum(batch.data.num_rows for batch in itertools.islice(batches, 2))
            # The first counts as read, because the second was asked for.
            assert (read, _standing(client)) == (30, {"billing": ({"0": 10}, 20)})
        service.kill()
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        assert _standing(client)["billing"][1] >= 20
        heading, _, row = _shown(service, TABLE)
        assert heading == ["table", "consumer", "unread", "rows", "lag", "at", "risk", "reported"]
        assert row[:2] == [TABLE, "billing"]

        _shown(service, TABLE, "--forget", "billing")
        assert _standing(client) == {}
        alone = CliRunner().invoke(command, ["--forget", "billing"])
        assert isinstance(alone.exception, InvalidRequestError)


def test_a_subscription_begins_with_the_lake_goes_on_live_and_is_taken_up_again(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(TABLE, SCHEMA)
        client.append(TABLE, _rows(0, 20))
        tier_once(client)
        client.append(TABLE, _rows(20, 30))

        first = client.subscribe(TABLE, start="full", consumer="copy")
        ids = []
        with contextlib.closing(first):  # type: ignore[type-var]
            for batch in first:
                ids += batch.data.column("id").to_pylist()
                token = json.dumps(batch.token)
                if len(ids) >= 30:
                    break
        client.append(TABLE, _rows(30, 40))
        second = client.subscribe(TABLE, start=json.loads(token), columns=["id"])
        with contextlib.closing(second):  # type: ignore[type-var]
            for batch in second:
                assert batch.data.schema.names == ["id"]
                ids += batch.data.column("id").to_pylist()
                if len(ids) >= 40:
                    break

        assert ids == list(range(40))
        assert _standing(client).keys() == {"copy"}
        with pytest.raises(InvalidRequestError, match="'where' is for start='full'"):
            client.subscribe(TABLE, start="latest", where="id > 1")  # type: ignore[call-overload]
