"""Prints what row-level statements do under Spark Connect, as JSON.

usage: connect_rows_probe.py ENDPOINT TABLE, a table with the key `id` and the column `v`
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

import streamhouse


def main(endpoint: str, table: str) -> None:
    """Run each statement; its result is the counts, the plan's first lines, or the error."""
    spark: Any = (
        SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    streamhouse.attach(spark, table, "acc", endpoint=endpoint)
    source = spark.sql("SELECT * FROM VALUES (1L, -1), (2L, 5), (9L, 7) AS p(id, amount)")
    merge = (
        "MERGE INTO acc USING {s} s ON acc.id = s.id WHEN MATCHED AND amount < 0 THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET v = acc.v + s.amount"
        " WHEN NOT MATCHED THEN INSERT (id, v) VALUES (id, amount)"
    )
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "explain": (f"EXPLAIN {merge}", {"s": source}),
        "merge": (merge, {"s": source}),
        "update": ("UPDATE acc a SET a.v = :v WHERE a.id = 3", {"args": {"v": 30}}),
        "delete": ("DELETE FROM acc WHERE id IN (SELECT id + 4 FROM range(1))", {}),
        "other side": (merge.replace("(id, amount)", "(id, v)"), {"s": source}),
        "script": ("EXECUTE IMMEDIATE 'DELETE FROM acc'", {}),
    }
    print(json.dumps({name: _answer(spark, *case) for name, case in cases.items()}))
    spark.stop()


def _answer(spark: Any, text: str, arguments: dict[str, Any]) -> Any:
    try:
        frame = spark.sql(text, **arguments)
        first = [tuple(row) for row in frame.collect()]
        again = [tuple(row) for row in frame.collect()]
    except Exception as error:  # noqa: BLE001 - the probe reports every error
        return type(error).__name__
    assert first == again
    return first[0][0].splitlines()[:2] if text.startswith("EXPLAIN") else first


if __name__ == "__main__":
    main(*sys.argv[1:])
