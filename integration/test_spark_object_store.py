"""Spark on a lake in S3: executors get the keys of the store, and nothing shown or logged does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from streamhouse.api.client import StreamhouseClient
from tests.support.object_store import REGION, SECRET_KEY, ObjectStore
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_executors_read_the_store_with_keys_of_the_service(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ObjectStore() as store:
        arguments = (
            *("--warehouse", "s3://lake/spark", "--lake-credentials", "shared"),
            *("--catalog-access", "service", "--retention-interval-ms", "100"),
            *("--catalog-property", f"s3.endpoint={store.endpoint}"),
            *("--catalog-property", f"s3.region={REGION}"),
        )
        with (
            ServiceProcess(tmp_path, *arguments, env=store.environment()) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            properties = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
            client.create_table("default.t", SCHEMA, bucket_count=2, properties=properties)
            ids = range(5_000)
            rows = pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)
            client.append("default.t", rows)
            assert tier_once(client, "default.t") == len(ids)

            reader = spark.read.format("streamhouse").option("endpoint", service.endpoint)
            frame = reader.load("default.t$lake")

            assert frame.count() == len(ids)
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                frame.explain(mode="extended")
            assert SECRET_KEY not in shown.getvalue()
            assert SECRET_KEY not in service.log_text()
            assert not [
                entry for entry in spark.sparkContext.getConf().getAll() if SECRET_KEY in entry[1]
            ]
