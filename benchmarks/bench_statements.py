"""What it costs that each Spark statement plans its reads afresh: processor time a statement.

Four ways to count the rows of a small table take turns in one session, with Spark's setting
`spark.sql.python.filterPushdown.enabled`, by which a statement is planned afresh, and without it:
a view of one `load()`, which has the rows of its first use without the setting, and a `load()` a
statement, which is how newer rows were read without it. The processor time is that of Java, of
Spark's Python processes and of the service together.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Final

from benchmarks.harness import family_cpu_seconds, make_rows, median, report
from benchmarks.spark_session import quiet_session
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

TABLE: Final = "default.counted"
TURNS: Final = 12
"""A turn is a few statements of each way; the first turns let Java compile what it runs."""
WARM_UP: Final = 4
STATEMENTS: Final = 4
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

_Way = Callable[[], object]


def main() -> None:
    """Report the price of planning afresh, in pairs."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            batch = make_rows(10_000)
            client.create_table(TABLE, batch.schema, bucket_count=2)
            client.append(TABLE, batch)
        spark = quiet_session()
        ways = _ways(spark, service.endpoint)
        taken_ms = _take_turns(spark, ways)
        spark.stop()
    for what, afresh, before in (
        ("a statement on a view of a load, against one that keeps its rows", "view", "kept view"),
        ("a load and its first statement, against the same without", "load", "kept load"),
        ("a statement on a view, against a load a statement without", "view", "kept load"),
    ):
        ratio = median(
            [new / old for new, old in zip(taken_ms[afresh], taken_ms[before], strict=True)]
        )
        report(
            f"planned afresh: {what}",
            measured=f"{median(taken_ms[afresh]):.0f} ms of processor",
            limit=f"{median(taken_ms[before]):.0f} ms",
            ratio=ratio,
            bar="no bar",
            reached=None,
        )


def _ways(spark: SparkSession, endpoint: str) -> dict[str, tuple[bool, _Way]]:
    """Return the ways by name: whether the setting is on, and one statement."""

    def loaded() -> None:
        frame = spark.read.format("streamhouse").option("endpoint", endpoint).load(TABLE)
        frame.createOrReplaceTempView("loaded")
        spark.sql("SELECT count(*) FROM loaded").collect()

    def counted(view: str) -> _Way:
        reader = spark.read.format("streamhouse").option("endpoint", endpoint)
        reader.load(TABLE).createOrReplaceTempView(view)
        return lambda: spark.sql(f"SELECT count(*) FROM {view}").collect()

    afresh = counted("afresh")
    spark.conf.set(PUSHDOWN, "false")
    kept = counted("kept")
    return {
        "view": (True, afresh),
        "kept view": (False, kept),
        "load": (True, loaded),
        "kept load": (False, loaded),
    }


def _take_turns(spark: SparkSession, ways: dict[str, tuple[bool, _Way]]) -> dict[str, list[float]]:
    """Return the milliseconds of processor a statement, of each way in each turn."""
    taken_ms: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + TURNS):
        # Every other turn goes the other way round: what one leaves to the next is shared fairly.
        for name, (is_on, statement) in list(ways.items())[:: 1 if turn % 2 else -1]:
            spark.conf.set(PUSHDOWN, str(is_on).lower())
            before_s = family_cpu_seconds()
            for _ in range(STATEMENTS):
                statement()
            if turn >= WARM_UP:
                taken_ms[name].append((family_cpu_seconds() - before_s) / STATEMENTS * 1e3)
    return taken_ms


if __name__ == "__main__":
    main()
