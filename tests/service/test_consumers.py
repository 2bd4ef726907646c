"""Where readers stand, against a real service: named subscriptions, the command, a restart."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.consumers import command
from streamhouse.core.errors import InvalidRequestError
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.waiting import wait_until

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
            with batches:
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
        assert alone.exit_code == 2


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
        with first:
            for batch in first:
                ids += batch.data.column("id").to_pylist()
                token = json.dumps(batch.token)
                if len(ids) >= 30:
                    break
        client.append(TABLE, _rows(30, 40))
        second = client.subscribe(TABLE, start=json.loads(token), columns=["id"])
        with second:
            for batch in second:
                assert batch.data.schema.names == ["id"]
                ids += batch.data.column("id").to_pylist()
                if len(ids) >= 40:
                    break

        assert ids == list(range(40))
        assert _standing(client).keys() == {"copy"}
        with pytest.raises(InvalidRequestError, match="'where' is for start='full'"):
            client.subscribe(TABLE, start="latest", where="id > 1")  # type: ignore[call-overload]


WAITS = {
    "table.log.ttl": "1ms",
    "table.log.segment-bytes": "64kb",
    "table.datalake.enabled": "false",
}
BATCH = 1_000


def _append(client: StreamhouseClient, path: str, batches: int) -> None:
    """Append batches of a segment each, which do not get smaller by being packed."""
    start = client.positions(path)[0].high_watermark
    for first in range(start, start + batches * BATCH, BATCH):
        texts = [Random(i).randbytes(40).hex() for i in range(first, first + BATCH)]
        rows = {"id": range(first, first + BATCH), "name": texts}
        client.append(path, pa.table(rows, schema=SCHEMA))


def _pass_of_retention(client: StreamhouseClient) -> None:
    """Return when retention has looked at every table: it came by twice at one that waits for none.

    Each time it takes all but the segment that is written to.
    """
    for _ in range(2):
        _append(client, "default.other", 2)
        end = client.positions("default.other")[0].high_watermark
        wait_until(
            lambda end=end: client.positions("default.other")[0].log_start_offset >= end - BATCH,
            "rows of 'other' go",
        )


def test_retention_waits_for_a_reader_over_restarts_until_the_disk_needs_the_room(
    tmp_path: Path,
) -> None:
    every = ("--retention-interval-ms", "20", "--disk-check-interval-ms", "20")
    with ServiceProcess(tmp_path, *every) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("default.other", SCHEMA, properties=WAITS)
        client.create_table(TABLE, SCHEMA, properties=WAITS | {"table.log.consumers.wait": "true"})
        client.report_position(TABLE, "billing", {0: 0})
        _append(client, TABLE, 10)
        _pass_of_retention(client)
        assert client.positions(TABLE)[0].log_start_offset == 0
        client.report_position(TABLE, "billing", {0: 4 * BATCH + 7})
        wait_until(
            lambda: client.positions(TABLE)[0].log_start_offset == 4 * BATCH, "what was read goes"
        )
        # Until then the files of what went may be on their way.
        _pass_of_retention(client)
        service.kill()

    for _ in range(2):
        # Killed, then ended: either way the service knows for whom it waits.
        with (
            ServiceProcess(tmp_path, *every) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            _pass_of_retention(client)
            assert client.positions(TABLE)[0].log_start_offset == 4 * BATCH
            found = client.read(TABLE, columns=["id"])["id"].to_pylist()
            assert found == list(range(4 * BATCH, 10 * BATCH))

    with (
        ServiceProcess(tmp_path, *every, "--disk-max", "512kb") as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        wait_until(lambda: client.positions(TABLE)[0].log_start_offset > 4 * BATCH, "room is made")
        (standing,) = client.consumers(TABLE)
        assert standing["name"] == "billing"
        wait_until(lambda: _unread_rows_deleted(service) > 0, "it says what went unread")


def _unread_rows_deleted(service: ServiceProcess) -> int:
    with urllib.request.urlopen(f"{service.endpoint}/metrics") as answer:
        text = answer.read().decode()
    counted = re.findall(r"^streamhouse_retention_unread_rows_total\S* (\S+)$", text, re.M)
    return sum(int(float(value)) for value in counted)
