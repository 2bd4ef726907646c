"""Runs pairs of queries in turn in Spark 3.5, with Iceberg's jar and the warehouse `live`.

Stdin: JSON with `uri`, `views` (folders of Parquet files by name), `pairs` (a name to two queries)
and `repeats`. The last line of stdout: JSON with the seconds of both queries by name. Run by the
environment of `integration/judges/spark35-requirements.txt`, without our package.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

from integration.judges.spark35_catalog import session

# As docs/catalog.md has it.
BROADCAST = "64m"


def main() -> None:
    request = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        spark = session(scratch, uri=request["uri"], token="", warehouse="live")
        spark.conf.set("spark.sql.autoBroadcastJoinThreshold", BROADCAST)
        for name, path in request["views"].items():
            spark.read.parquet(path).createOrReplaceTempView(name)
        found = {}
        for name, pair in request["pairs"].items():
            # Twice: the first run compiles.
            for _ in range(2):
                ours, plain = (spark.sql(query).collect() for query in pair)
                assert ours == plain, f"{name}: {ours[:3]} and {plain[:3]}"
            found[name] = ([], [])
            for _ in range(request["repeats"]):
                for query, seconds in zip(pair, found[name], strict=True):
                    start = time.perf_counter()
                    spark.sql(query).collect()
                    seconds.append(time.perf_counter() - start)
        spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
