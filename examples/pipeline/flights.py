"""A declarative pipeline over Streamhouse: a streaming table, a materialized view and a sink.

`spark-pipelines` imports this file in a session of its own. It reads `pipeline.flights` and writes
`pipeline.delays`, tables of the service at STREAMHOUSE_ENDPOINT.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import streamhouse

spark = SparkSession.active()  # of spark-pipelines; PySpark 4.1 gives no name `spark`
streamhouse.register(spark)


@dp.table
def late_flights() -> DataFrame:
    """Every flight that was late, kept by the pipeline: each run adds what is new."""
    flights = spark.readStream.format("streamhouse").load("pipeline.flights")
    return flights.where("delay > 15")


@dp.materialized_view
def delay_by_carrier() -> DataFrame:
    """Made anew by each run, from the table as it is then."""
    flights = spark.read.format("streamhouse").load("pipeline.flights")
    return flights.groupBy("carrier").agg(F.avg("delay").alias("delay"), F.count("*").alias("n"))


dp.create_sink("delays", format="streamhouse", options={"table": "pipeline.delays"})


@dp.append_flow(target="delays")
def to_delays() -> DataFrame:
    """What the sink gets; a primary key table as its target is upserted."""
    return spark.readStream.table("late_flights")
