"""A Spark application for test_spark_conf: says, as one line of JSON, what the settings made."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from pyspark.sql import SparkSession

# Loading these makes Spark declare the settings of its modules.
_DECLARING = (
    "org.apache.spark.sql.internal.SQLConf",
    "org.apache.spark.sql.internal.StaticSQLConf",
    "org.apache.spark.sql.connect.config.Connect",
)


def _worker(_: Iterator[int]) -> Iterator[tuple[int, str]]:
    import streamhouse

    # Workers are forked by one daemon an executor.
    yield os.getppid(), streamhouse.__version__


def main() -> None:
    spark = SparkSession.builder.getOrCreate()
    context = spark.sparkContext
    java = context._jvm
    for name in _DECLARING:
        java.java.lang.Class.forName(f"{name}$").getField("MODULE$").get(None)
    declared = java.org.apache.spark.internal.config.ConfigEntry
    workers = context.parallelize(range(8), 8).mapPartitions(_worker).collect()
    report = {
        "settings": dict(context.getConf().getAll()),
        "unknown": [key for key in sys.argv[1:] if declared.findEntry(key) is None],
        "executors": len({daemon for daemon, _ in workers}),
        "versions": sorted({version for _, version in workers}),
    }
    print(json.dumps(report))
    spark.stop()


if __name__ == "__main__":
    main()
