"""Prints what reads with different options of one name give under Spark Connect, as JSON.

usage: connect_options_probe.py ENDPOINT TABLE, a table of column `id` with the rows 0 to 9
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

import streamhouse
from streamhouse import UnsupportedError

FEW, MANY = "id < 3", "id >= 8"


def main(endpoint: str, table: str) -> None:
    """Run every case; a case's result is its ids in order, or the name of the error."""
    spark: Any = (
        SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    streamhouse.register(spark)
    streamhouse.attach(spark, table, "opt", endpoint=endpoint)

    spark.sql("CREATE TEMP VIEW plain AS SELECT id FROM opt")

    def frame(where: str) -> Any:
        return spark.read.option("where", where).table("opt")

    def in_sql(where: str) -> Any:
        return spark.sql(f"SELECT id FROM opt WITH (where = '{where}')")

    def view_of_sql() -> Any:
        in_sql(FEW).createOrReplaceTempView("few_in_sql")
        return spark.sql("SELECT id FROM few_in_sql UNION ALL SELECT id FROM opt")

    cases: dict[str, Callable[[], Any]] = {
        "query": lambda: in_sql(FEW),
        "queries": lambda: in_sql(FEW).union(in_sql(MANY)),
        "query and table": lambda: in_sql(FEW).union(spark.table("opt")),
        "view of a query": view_of_sql,
        "script with a view": lambda: spark.sql(
            f"BEGIN SELECT id FROM opt WITH (where = '{FEW}') UNION ALL SELECT id FROM plain; END"
        ),
        "view": lambda: spark.sql(
            f"CREATE TEMP VIEW v AS SELECT id FROM opt WITH (where = '{FEW}')"
        ),
        "frame": lambda: frame(FEW),
        "frames": lambda: frame(FEW).union(frame(MANY)),
        "frame and table": lambda: frame(FEW).union(spark.table("opt")),
        "frame and query": lambda: frame(FEW).union(spark.sql("SELECT id FROM opt")),
        "frames in SQL": lambda: spark.sql(
            "SELECT id FROM {few} UNION ALL SELECT id FROM {many} UNION ALL SELECT id FROM opt",
            few=frame(FEW),
            many=frame(MANY),
        ),
    }
    print(json.dumps({name: _ids(case) for name, case in cases.items()}))
    spark.stop()


def _ids(case: Callable[[], Any]) -> list[int] | str:
    try:
        return sorted(row.id for row in case().collect())
    except UnsupportedError as error:
        refusals = (".option('where', ", "with different options")
        return "refused" if any(text in error.message for text in refusals) else error.message


if __name__ == "__main__":
    main(*sys.argv[1:])
