"""Spark, tiering and the lake over a service of two shards: nobody has to know which has what."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from streamhouse.cli import cli
from streamhouse.client import StorageClient
from tests.support.in_process_service import EVENTS, event_rows
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TABLES = ("db.a", "db.b")


def test_spark_writes_and_reads_tables_of_both_shards(spark: SparkSession, tmp_path: Path) -> None:
    arguments = ("--shards", "2", "--journal", f"file://{tmp_path / 'store'}")
    with ServiceProcess(tmp_path / "data", *arguments, is_executed=True) as service:
        with StorageClient(service.endpoint) as client:
            client.create_database("db")
            for table in TABLES:
                client.create_table(table, EVENTS, properties={"table.datalake.enabled": "true"})
                client.append(table, pa.Table.from_batches([event_rows(0, 50)], EVENTS))
            assert [shard["table_count"] for shard in client.shards()] == [1, 1]

            tiered = CliRunner().invoke(cli, ["tier", "--once", "--endpoint", service.endpoint])
            assert tiered.exit_code == 0, tiered.output
            for table in TABLES:
                assert client.positions(table)[0].tiered_offset == 50

        options = {"endpoint": service.endpoint}
        for table in TABLES:
            rows = spark.createDataFrame(
                [(i, f"n{i}") for i in range(50, 60)], "id long, name string"
            )
            rows.write.format("streamhouse").options(**options, table=table).mode("append").save()
        for table in TABLES:
            found = spark.read.format("streamhouse").options(**options, table=table).load()
            assert sorted(row.id for row in found.collect()) == list(range(60))
