"""A program for test_spark_conf: registers, attaches a name twice, and runs a stateful stream.

Called with the service's endpoint, a folder, and `classic` or `connect`.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import SparkSession

import streamhouse


def main(endpoint: str, folder: str, kind: str) -> None:
    builder: Any = SparkSession.builder
    builder = builder.remote("local[1]") if kind == "connect" else builder.master("local[1]")
    spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    streamhouse.register(spark)
    spark.range(3).write.format("streamhouse").option("endpoint", endpoint).mode("append").save(
        "default.quiet"
    )
    for _ in range(2):
        streamhouse.attach(spark, "default.quiet", "quiet", endpoint=endpoint)
    stream = spark.readStream.format("streamhouse").option("endpoint", endpoint)
    query = (
        stream.load("default.quiet")
        .groupBy("id")
        .count()
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print(spark.table("quiet").count())
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
