"""Makes every public call that may need an extra, and prints what became of each.

A line each: the call, the extra that it needs, and `ok` or the last line of its error.
Arguments: the endpoint of a service whose table `tiered` has rows in the lake and in the log, an
empty folder, and the extras that are installed. The table has an `id` and a `name`, `keyed` has the
same and a primary key.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENDPOINT, FOLDER, *INSTALLED = sys.argv[1:]
os.environ["STREAMHOUSE_ENDPOINT"] = ENDPOINT
# Else Spark takes the first `python3` of the path, which may be of another environment.
os.environ["PYSPARK_PYTHON"] = sys.executable

import streamhouse  # noqa: E402  # it takes its endpoint from the environment

COMMAND = str(Path(sys.executable).with_name("streamhouse"))
CALLS: list[tuple[str, str, Callable[[], Any]]] = []


def call(extra: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Note a call that needs an extra."""

    def noted(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS.append((function.__name__, extra, function))
        return function

    return noted


def command(name: str, extra: str, *arguments: str) -> None:
    """Note a command of the shell that ends by itself."""

    def run() -> None:
        done = subprocess.run(
            [COMMAND, *arguments],
            env={**os.environ, "COLUMNS": "1000"},
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if done.returncode or "Traceback" in done.stderr:
            raise RuntimeError(done.stderr[-2_000:] or done.stdout[-2_000:])

    CALLS.append((f"streamhouse {name}", extra, run))


def starts(name: str, extra: str, *arguments: str, ready: str) -> None:
    """Note that a command that goes on starts, and says `ready`; then it is ended."""

    def run() -> None:
        with subprocess.Popen(
            [COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if ready in line:
                    process.terminate()
        if not any(ready in line for line in lines):
            raise RuntimeError("".join(lines)[-2_000:])

    CALLS.append((f"streamhouse {name}", extra, run))


client = streamhouse.StreamhouseClient(ENDPOINT)


@call("")
def write_and_look_up() -> None:
    client.upsert("keyed", [{"id": 7, "name": "seven"}])
    assert client.lookup_one("keyed", id=7) == {"id": 7, "name": "seven"}
    client.append("plain", [{"id": 1, "name": "x"}])
    assert client.read("plain").num_rows > 0


@call("lake")
def read() -> None:
    assert client.read("tiered").num_rows == 5


@call("lake")
def read_where() -> None:
    assert client.read("tiered", where="id > 3").num_rows == 1


@call("")
def read_changes() -> None:
    assert client.read("keyed$changelog").num_rows >= 3


@call("lake")
def read_files() -> None:
    assert client.read("tiered$files").num_rows > 0


@call("lake")
def scan() -> None:
    with client.scan("tiered") as rows:
        assert sum(batch.num_rows for batch in rows) == 5


@call("lake")
def count_where() -> None:
    assert client.count("tiered", where="id > 3") == 1


@call("")
def subscribe() -> None:
    with client.subscribe("tiered", start="full") as batches:
        assert next(iter(batches)).data.num_rows


@call("sql")
def query() -> None:
    (row,) = client.query("SELECT count(*) AS n FROM tiered").to_pylist()
    assert row == {"n": 5}


for public in ("register", "attach", "read", "sql", "Table", "cdc", "lookup_join"):
    CALLS.append((f"import {public}", "spark", lambda name=public: getattr(streamhouse, name)))


def session() -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    builder = builder.remote("local[1]") if "connect" in INSTALLED else builder.master("local[1]")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    streamhouse.register(spark)
    return spark


@call("spark")
def spark_reads_and_changes() -> None:
    register = streamhouse.register
    spark = session()
    assert register is streamhouse.register
    assert streamhouse.read(spark, "tiered").count() == 5
    rows = spark.createDataFrame([(40, "forty"), (41, "x")], "id bigint, name string")
    rows.write.format("streamhouse").mode("append").save("keyed")
    table = streamhouse.Table(spark, "keyed")
    table.update({"name": "concat(name, '!')"}, where="id = 40")
    table.delete("id = 41")
    table.merge(rows).when_matched_update_all().when_not_matched_insert_all().execute()
    assert table.history().count() > 0
    streamhouse.attach(spark, "keyed", "keyed")
    names = {row.id: row.name for row in spark.table("keyed").collect()}
    assert names[40] == "forty", names
    assert streamhouse.sql(spark, "SELECT count(*) AS n FROM keyed").collect()[0].n >= 4
    looked_up = streamhouse.lookup_join(rows.select("id"), "keyed", on="id")
    assert looked_up.count() == 2
    spark.stop()


command("tables", "", "tables")
command("tables --sizes", "lake", "tables", "--sizes")
command("tier", "lake", "tier", "--once", "--table", "default.tiered")
command("maintain", "lake", "maintain", "--dry-run", "tiered")
command("import", "lake", "import", "--help")
on_spark = ("tier", "--once", "--master", "local[1]", "--table", "default.plain")
command("tier --master", "spark", *on_spark)
for name in ("backup", "check", "dump", "restore"):
    command(name, "server", name, "--help")
serve = ("serve", "--data-dir", f"{FOLDER}/data", "--port", "0")
starts("serve", "server", *serve, ready="streamhouse listening on")
door = "streamhouse serving Kafka clients on"
starts("serve --kafka-port", "kafka", *serve, "--kafka-port", "0", ready=door)
# There is no such source, as the driver in Java says.
source = "postgres://nobody@127.0.0.1:1/nothing"
starts("cdc", "cdc", "cdc", source, "--tables", "*", ready="Connection to 127.0.0.1:1 refused")

for name, extra, function in CALLS:
    try:
        function()
        said = "ok"
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the test judges it
        said = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[-3000:]
    print(f"{name}|{extra}|{said}", flush=True)
client.close()
