"""Reads Iceberg tables with Iceberg Java: requests as JSON on stdin, a line of rows each on stdout.

An argument `bucket=/folder` says where the objects of an S3 bucket have been copied to, as they
are: no wheel has Java's client of S3. Paths in metadata stay those of the bucket. Run by the
environment of `spark35-requirements.txt`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from integration.judges.json_rows import to_json

ROW_ID_COLUMN: Final = "_row_id"
SEQUENCE_COLUMN: Final = "_last_updated_sequence_number"


def iceberg_jar() -> str:
    """The Iceberg runtime for Spark 3.5 and Scala 2.12, out of its wheel."""
    spec = importlib.util.find_spec("snowpark_connect_deps_iceberg")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    (jar,) = folder.rglob("iceberg-spark-runtime-3.5_2.12-*.jar")
    return str(jar)


def session(scratch: str, buckets: Mapping[str, str]) -> SparkSession:
    """A session whose only catalog is an empty one: tables are read by their metadata file."""
    copies = {
        f"spark.hadoop.fs.viewfs.mounttable.{bucket}.linkFallback": f"file://{folder}"
        for bucket, folder in buckets.items()
    }
    builder = SparkSession.builder.master("local[2]").config("spark.jars", iceberg_jar())
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": scratch,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.catalog.default_iceberg": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.default_iceberg.type": "hadoop",
        "spark.sql.catalog.default_iceberg.warehouse": scratch,
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
        **copies,
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    # `timestamp` values are turned into Python's local time on their way here.
    os.environ["TZ"] = "UTC"
    time.tzset()
    requests = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        spark = session(scratch, dict(text.split("=", 1) for text in sys.argv[1:]))
        for metadata_location, query in requests:
            try:
                path = metadata_location.removeprefix("file://")
                lake_rows = spark.read.format("iceberg").load(path)
                if ROW_ID_COLUMN in query:
                    # A view has a metadata column only if it is asked for by name.
                    lake_rows = lake_rows.select("*", ROW_ID_COLUMN, SEQUENCE_COLUMN)
                lake_rows.createOrReplaceTempView("lake_table")
                rows = [row.asDict(recursive=True) for row in spark.sql(query).collect()]
            except (PySparkException, Py4JJavaError) as error:
                # No rows that anybody expects; the other tables are read all the same.
                rows = [{"error": f"{metadata_location}: {error}"}]
            print(to_json(rows))
        spark.stop()


if __name__ == "__main__":
    main()
