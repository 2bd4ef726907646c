"""The Spark session of the benchmarks of statements."""

from __future__ import annotations

from pyspark.sql import SparkSession

import streamhouse


def quiet_session() -> SparkSession:
    """Return a session of two threads that prints nothing, with our format."""
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    streamhouse.register(session)
    return session
