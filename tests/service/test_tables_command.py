"""`streamhouse tables` against a real service: rows and bytes of every table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.maintain import command as maintain
from streamhouse.cli.client_commands.tables import command
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(count: int) -> pa.Table:
    return pa.table({"id": range(count), "name": [f"n{i}" for i in range(count)]}, schema=SCHEMA)


def test_no_figure_is_cut_off_in_80_columns(tmp_path: Path) -> None:
    name = "default.a_table_with_a_name_that_is_long_for_a_terminal"
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(name, SCHEMA, bucket_count=2)
        client.append(name, _rows(1_234_567))
        tier_once(client, name)
        client.append(name, _rows(10))

        shown = CliRunner().invoke(command, ["--endpoint", service.endpoint], env={"COLUMNS": "80"})

        assert shown.exit_code == 0, shown.output
        heading, *lines = [line.split() for line in shown.output.splitlines()]
        assert " ".join(heading) == "table buckets rows in the log in the lake untiered"
        assert lines[0][1:] == ["2", "1,234,577", "1,234,577", "1,234,567", "10"]
        assert lines[0][0] + "".join(line[0] for line in lines[1:] if line) == name


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    name = "default.a_table_with_a_name_that_is_long_for_a_terminal" + "_and_longer" * 7
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(name, SCHEMA, bucket_count=2)
        client.append(name, _rows(1_234))

        env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        main = "from streamhouse.cli import main; main()"
        given = [sys.executable, "-c", main, "tables", "--endpoint"]
        runs = [
            subprocess.run(
                [*given, service.endpoint, *more], capture_output=True, text=True, env=env
            )
            for more in ([], ["--sizes"], [name])
        ]

    listed, sizes, described = [run.stdout.splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], runs
    assert listed[1].split()[:4] == [name, "2", "1,234", "1,234"]
    assert len(listed) == 2
    assert any(line.startswith(name) for line in sizes)
    assert any(line.split() == ["id", "bigint", "no"] for line in described)
    assert all(run.stdout.isascii() for run in runs), runs


def test_rows_that_have_expired_are_counted_nowhere(tmp_path: Path) -> None:
    """They may lie in the log still, and no read finds them."""
    properties = {"table.datalake.ttl": "1ms", "table.datalake.auto-maintenance": "false"}
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("default.t", SCHEMA, bucket_count=2, properties=properties)
        client.append("default.t", _rows(3_000))
        tier_once(client)
        assert _counts(service) == ["2", "3,000", "3,000", "3,000", "0"]

        given = ["default.t", "--endpoint", service.endpoint]
        assert CliRunner().invoke(maintain, given).exit_code == 0
        assert _counts(service) == ["2", "0", "3,000", "0", "0"]

        client.append("default.t", _rows(500))
        assert _counts(service) == ["2", "500", "3,500", "0", "500"]
        tier_once(client)
        client.append("default.t", _rows(70))
        assert _counts(service) == ["2", "570", "3,570", "500", "70"]
        assert client.read("default.t").num_rows == 570
        (shown,) = client.status()["tables"]
        assert (shown["row_count"], shown["tiering"]["untiered_rows"]) == (570, 70)


def test_rows_by_key_are_counted_not_their_changes(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("default.t", SCHEMA, primary_key=["id"])
        client.upsert("default.t", _rows(100))
        tier_once(client)
        client.delete("default.t", _rows(40).select(["id"]))

        assert _counts(service) == ["1", "60", "140", "100", "40"]


def _counts(service: ServiceProcess) -> list[str]:
    """What is shown of the only table: buckets, rows, those in log and lake, untiered."""
    shown = CliRunner().invoke(command, ["--endpoint", service.endpoint], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    (line,) = [line.split() for line in shown.output.splitlines() if line.startswith("default.t ")]
    return line[1:]


def test_bytes_hot_cold_and_doubled(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("default.tiered", SCHEMA, bucket_count=2)
        client.create_table("default.keyed", SCHEMA, primary_key=["id"])
        client.append("default.tiered", _rows(10_000))
        tier_once(client, "default.tiered")
        client.append("default.tiered", _rows(10_000))
        client.upsert("default.keyed", _rows(100))

        sizes = client.table_sizes("default.tiered")
        assert sizes.hot_bytes == pytest.approx(2 * sizes.doubled_bytes, rel=0.1)
        assert sizes.hot_bytes > 20_000 * 8
        assert client.table_sizes("default.keyed").buckets[0].key_bytes > 0

        shown = CliRunner().invoke(
            command, ["--endpoint", service.endpoint, "--sizes"], env={"COLUMNS": "140"}
        )
        assert shown.exit_code == 0, shown.output
        (line,) = [line for line in shown.output.splitlines() if "default.tiered" in line]
        cells = [cell.strip() for cell in re.split("  +", line) if cell.strip()]
        assert cells[4] == "10,000"
        # zstd makes less of a row than the log, which is not compressed.
        assert 0 < float(cells[5]) < 1

        refused = CliRunner().invoke(
            command, ["--endpoint", service.endpoint, "--sizes", "default.tiered"]
        )
        assert refused.exit_code == 2
        assert "give no PATH" in refused.output


def test_each_lake_table_has_a_line(tmp_path: Path) -> None:
    properties = {"table.datalake.changelog": "true", "table.datalake.batch-layout.sort": "name"}
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("default.users", SCHEMA, primary_key=["id"], properties=properties)
        client.upsert("default.users", _rows(1_000))
        client.upsert("default.users", _rows(100).set_column(1, "name", pa.array(["x"] * 100)))
        tier_once(client)

        shown = CliRunner().invoke(
            command, ["--endpoint", service.endpoint, "--sizes"], env={"COLUMNS": "140"}
        )

        assert shown.exit_code == 0, shown.output
        lines = [
            [cell.strip() for cell in re.split("  +", line) if cell.strip()]
            for line in shown.output.splitlines()
        ]
        found = {cells[0]: cells for cells in lines if cells}
        rows = {name: cells[4] for name, cells in found.items() if "users" in name}
        assert rows == {
            "default.users": "1,000",
            "default.users$batch": "1,000",
            "default.users$changelog": "1,200",
        }
        for name in ("default.users$batch", "default.users$changelog"):
            # All of it is there a second time.
            assert found[name][1] == "0 B"
            assert found[name][2] == found[name][3] != "0 B"


def test_a_table_whose_rounds_scatter_their_rows_is_named(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("scattered", SCHEMA, partitioned_by=["id"])
        client.append("scattered", _rows(70))
        tier_once(client, "scattered")

        shown = CliRunner().invoke(
            command, ["--endpoint", service.endpoint], env={"COLUMNS": "200"}
        )
        debt = client.status()["tables"][0]["tiering"]["maintenance_debt"]

    assert "default.scattered: 70 files for 70 rows, a round writes a file to each" in shown.output
    assert (debt["round_files"], debt["round_rows"], debt["is_scattered"]) == (70, 70, True)
