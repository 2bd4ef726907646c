"""Row statements as text beside the calls of `Table` that do the same: wall time, in pairs.

`spark.sql` on an attached name and the call of `streamhouse.Table` take turns in one session, each
with the same rows of a small primary key table. The median of the pairs' ratios is judged.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from benchmarks.harness import median, report, timed
from benchmarks.spark_session import quiet_session
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import streamhouse

TABLE: Final = "default.accounts"
NAME: Final = "acc"
ROWS: Final = 10_000
WARM_UP: Final = 6
PAIRS: Final = 25
BAR: Final = 1.1

_Way = Callable[[], object]


def main() -> None:
    """Report the median wall time of each statement, as text and as a call."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            _fill(client)
        spark = quiet_session()
        streamhouse.attach(spark, TABLE, NAME, endpoint=service.endpoint)
        spark.range(100).selectExpr("id", "1L AS more").createOrReplaceTempView("pay")
        table = streamhouse.Table(spark, TABLE, endpoint=service.endpoint)
        for what, (text, call) in _statements(spark, table).items():
            _compare(what, text, call)
        spark.stop()


def _statements(spark: SparkSession, table: streamhouse.Table) -> dict[str, tuple[_Way, _Way]]:
    def text(statement: str) -> _Way:
        return lambda: spark.sql(statement).collect()

    merge = (
        f"MERGE INTO {NAME} USING pay ON {NAME}.id = pay.id"
        " WHEN MATCHED THEN UPDATE SET points = points + more"
        " WHEN NOT MATCHED THEN INSERT (id, points) VALUES (pay.id, more)"
    )
    return {
        "UPDATE of 100 rows by a condition": (
            text(f"UPDATE {NAME} SET points = points + 1 WHERE id < 100"),
            lambda: table.update({"points": "points + 1"}, "id < 100"),
        ),
        "UPDATE of a key": (
            text(f"UPDATE {NAME} SET points = points + 1 WHERE id = 7"),
            lambda: table.update({"points": "points + 1"}, "id = 7"),
        ),
        "DELETE by a condition, no row": (
            text(f"DELETE FROM {NAME} WHERE points < 0"),
            lambda: table.delete("points < 0"),
        ),
        "MERGE of 100 rows": (
            text(merge),
            lambda: (
                table.merge(spark.table("pay"), {"id": "id"}, source_alias="pay")
                .when_matched_update({"points": "points + more"})
                .when_not_matched_insert({"id": "pay.id", "points": "more"})
                .execute()
            ),
        ),
    }


def _compare(what: str, text: _Way, call: _Way) -> None:
    text_s, call_s = [], []
    for turn in range(WARM_UP + PAIRS):
        # Every other turn goes the other way round: what one leaves to the next is shared fairly.
        ways = [(text, text_s), (call, call_s)]
        for way, taken_s in ways if turn % 2 else reversed(ways):
            taken_s.append(timed(way))
    text_s, call_s = text_s[WARM_UP:], call_s[WARM_UP:]
    ratio = median([text / call for text, call in zip(text_s, call_s, strict=True)])
    report(
        f"{what}, as text",
        measured=f"{median(text_s) * 1e3:.0f} ms",
        limit=f"by the call {median(call_s) * 1e3:.0f} ms",
        ratio=ratio,
        bar=f"at most {BAR}",
        reached=ratio <= BAR,
    )


def _fill(client: StreamhouseClient) -> None:
    fields = [pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]
    schema = pa.schema([*fields, ("points", pa.int64())])
    client.create_table(TABLE, schema, primary_key=["id"], bucket_count=2)
    names = pa.array([f"name {key}" for key in range(ROWS)])
    rows = pa.table([pa.array(range(ROWS)), names, pa.array(range(ROWS))], schema=schema)
    client.upsert(TABLE, rows)


if __name__ == "__main__":
    main()
