"""What test_spark_deployments runs: read a table, look rows up, copy it by batch and by stream."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import streamhouse

SOURCE = "default.deployed"
LOOKED_UP = "default.looked_up"


def main(target: str, checkpoint: str) -> None:
    """Run against the service that STREAMHOUSE_ENDPOINT names."""
    builder = SparkSession.builder
    if remote := os.environ.get("SPARK_REMOTE_URL"):
        spark = builder.remote(remote).getOrCreate()
    else:
        if master := os.environ.get("MASTER"):
            builder = (
                builder.master(master)
                .config("spark.executor.memory", "512m")
                .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
                .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
            )
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    streamhouse.register(spark)
    frame = spark.read.format("streamhouse").load(SOURCE)
    sys.stdout.write(f"read {frame.count()}\n")
    numbers = spark.range(200)
    streamhouse.register_lookup(spark, LOOKED_UP, "looked_up", columns=["name"])
    looked_up = streamhouse.lookup_join(numbers, LOOKED_UP, "id", columns=["name"], how="inner")
    by_name = looked_up.selectExpr("name = looked_up(id).name AS same").where("same").count()
    sys.stdout.write(f"looked up {looked_up.count()} {by_name}\n")
    sys.stdout.write(f"executors {_executors(spark, remote is not None)}\n")

    half = spark.read.format("streamhouse").option("where", "id < 2500").load(SOURCE)
    half.write.format("streamhouse").option("bucket.num", 2).mode("append").save(target)
    rest = spark.readStream.format("streamhouse").option("where", "id >= 2500").load(SOURCE)
    writer = rest.writeStream.format("streamhouse").option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start(target)
    query.awaitTermination(120)
    spark.stop()


def _executors(spark: SparkSession, is_remote: bool) -> int:
    """Return how many processes the tasks of a read ran under."""
    if is_remote:
        return 0
    reader = spark.read.format("streamhouse").option("minPartitions", 8)
    parts = reader.option("maxSplitBytes", "32kb").load(SOURCE)
    found = parts.rdd.mapPartitions(lambda _: iter([os.getppid()])).collect()
    return len(set(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
