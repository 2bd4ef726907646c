"""Runs SQL in Iceberg Java through a catalog, called `lake`; used for what reads cannot show.

Stdin: JSON with `statements`, and `uri` and `token` of a REST catalog, or the folder of a Hadoop
catalog as `warehouse`. Stdout: a line for each statement, a JSON list of
rows, or a JSON object with `error` when it failed. Run by the environment of
`spark35-requirements.txt`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from integration.judges.json_rows import to_json
from integration.judges.spark35_read import iceberg_jar


def session(scratch: str, *, uri: str = "", token: str = "", warehouse: str = "") -> SparkSession:
    """A session with the catalog `lake` and Iceberg's SQL extensions."""
    catalog = {"type": "rest", "uri": uri, "token": token} if uri else {"type": "hadoop"}
    builder = SparkSession.builder.master("local[2]").config("spark.jars", iceberg_jar())
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": scratch,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.extensions": (
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
        ),
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        **{f"spark.sql.catalog.lake.{key}": value for key, value in catalog.items()},
        "spark.sql.catalog.lake.warehouse": warehouse,
        "spark.sql.catalog.lake.cache-enabled": "false",
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    request = json.load(sys.stdin)
    statements = request.pop("statements")
    with tempfile.TemporaryDirectory() as scratch:
        spark = session(scratch, **request)
        for statement in statements:
            try:
                rows = [row.asDict(recursive=True) for row in spark.sql(statement).collect()]
                print(to_json(rows))
            except (PySparkException, Py4JJavaError) as error:
                print(json.dumps({"error": str(error)}))
        spark.stop()


if __name__ == "__main__":
    main()
