"""A program of its own that a test may kill: streams one table into another from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import streamhouse
from streamhouse.connector import write_batch


def main(endpoint: str, source: str, sink: str, checkpoint: str, how: str) -> None:
    """Copy what there is in small micro-batches; a line on stdout after each of them."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    streamhouse.register(spark)
    frame = (
        spark.readStream.format("streamhouse")
        .option("endpoint", endpoint)
        .option("maxOffsetsPerTrigger", "500")
        .load(source)
    )

    def copy(rows: DataFrame, batch_id: int) -> None:
        write_batch(rows, batch_id, table=sink, endpoint=endpoint)
        sys.stdout.write(f"wrote {batch_id}\n")
        sys.stdout.flush()

    writer = frame.writeStream.option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True)
    if how == "foreach_batch":
        query = writer.foreachBatch(copy).start()
    else:
        query = writer.format("streamhouse").option("endpoint", endpoint).start(sink)
    query.awaitTermination()
    Path(checkpoint, "done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
