"""The wheel alone, with its own few packages, is a client; what it lacks says what to install."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackagePath, files
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from integration.installed_wheel import ROOT, run, start, wheel
from streamhouse.api.client import StreamhouseClient
from tests.support.dependencies import (
    asked_by_client,
    asked_by_extra,
    installed_closure,
    light_packages,
)
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = ["wheel"]

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

_CLIENT: Final = """
import sys
import pyarrow as pa
from streamhouse import Producer, StreamhouseClient

with StreamhouseClient(sys.argv[1]) as client:
    schema = pa.schema([pa.field("shop", pa.int64(), nullable=False), ("city", pa.string())])
    client.create_table("shops", schema, primary_key=["shop"], bucket_count=4)
    many = pa.table({"shop": range(1_000), "city": [f"city {n}" for n in range(1_000)]})
    client.upsert("shops", many)
    assert client.lookup_one("shops", shop=6) == {"shop": 6, "city": "city 6"}
    client.create_table("clicks", pa.schema([("id", pa.int64())]), bucket_count=2)
    client.append("clicks", pa.table({"id": [1, 2, 3]}))
    assert client.read("clicks").num_rows == 3
    assert client.read("shops").num_rows == 1_000
    for batch in client.subscribe("clicks", start="earliest"):
        assert batch.data.num_rows
        break
    try:
        client.read("clicks", where="id > 1")
    except ImportError as error:
        print(error)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"pyspark", "pyiceberg", "fastapi", "rocksdict", "pandas"}, loaded
"""

# Each example is run, and the extra that its text asks for is what it says it lacks.
_EXAMPLES: Final = """
import re, sys

text = open(sys.argv[1], encoding="utf-8").read()
names, end = {}, 0
for example in re.finditer(r"^```python\\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
    asked = re.search(r"pyspark-streamhouse\\[(lake|sql)\\]", text[end : example.start()])
    end = example.end()
    try:
        exec(example.group(1), names)
    except ImportError as error:
        assert asked is not None and asked.group() in str(error), (str(error), example.group(1))
        print(asked.group(1))
    else:
        assert asked is None, example.group(1)
names["client"].close()
"""


# Each call of Spark's public names that moves rows.
_ALL: Final = """
import os, sys
os.environ["STREAMHOUSE_ENDPOINT"] = sys.argv[1]
import pyarrow as pa
import streamhouse
from pyspark.sql import SparkSession
from streamhouse import StreamhouseClient, Table

with StreamhouseClient(sys.argv[1]) as client:
    client.create_table("stock", "item BIGINT NOT NULL, pieces BIGINT", primary_key="item")
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
streamhouse.register(spark)
rows = spark.createDataFrame(pa.table({"item": range(10), "pieces": [5] * 10}))
rows.write.format("streamhouse").mode("append").save("stock")
table = Table(spark, "stock")
table.delete("item < 2")
table.update({"pieces": "pieces + 1"}, where="item = 2")
source = spark.createDataFrame([(3, 0), (40, 1)], "item bigint, pieces bigint")
table.merge(source).when_matched_update_all().when_not_matched_insert_all().execute()
streamhouse.attach(spark, "stock", "stock")
print(sorted(tuple(row) for row in spark.table("stock").collect())[:3])
print(streamhouse.read(spark, "stock").count())
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The `bin` of an environment with the wheel and what it alone asks for."""
    return _environment(tmp_path_factory.mktemp("light"), wheel, light_packages())


def _environment(folder: Path, wheel: Path, packages: Iterable[str]) -> Path:
    """Return the `bin` of an environment with the wheel and some packages, as links to ours."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    for name in packages:
        for file in files(name) or ():
            _link(file, site)
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", str(wheel))
    return python.parent


def _link(file: PackagePath, site: Path) -> None:
    top = file.parts[0]
    if top in ("..", "__pycache__") or (site / top).exists():
        return
    (site / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServiceProcess(tmp_path_factory.mktemp("data")) as service:
        yield service.endpoint


def test_a_client_appends_reads_and_looks_up(light: Path, endpoint: str) -> None:
    said = run(str(light / "python"), "-c", _CLIENT, endpoint)

    assert said == (
        "'where' needs the lake's libraries (pyiceberg is not installed):"
        " pip install 'pyspark-streamhouse[lake]'"
    )


def test_the_extra_all_has_what_every_call_of_spark_needs(
    tmp_path: Path, wheel: Path, endpoint: str
) -> None:
    packages = installed_closure([*asked_by_client(), *asked_by_extra("all")])
    python = _environment(tmp_path, wheel, packages) / "python"

    printed = run(str(python), "-c", _ALL, endpoint)

    assert printed.splitlines()[-2:] == ["[(2, 6), (3, 0), (4, 5)]", "9"]


def test_reading_tiered_rows_says_what_to_install(light: Path, endpoint: str) -> None:
    with StreamhouseClient(endpoint) as client:
        client.create_table("tiered", pa.schema([("id", pa.int64())]))
        client.append("tiered", pa.table({"id": [1, 2, 3]}))
        tier_once(client)

    program = "import sys, streamhouse; streamhouse.StreamhouseClient(sys.argv[1]).read('tiered')"
    done = start(str(light / "python"), "-c", program, endpoint)

    assert done.stderr.splitlines()[-1].endswith(
        "MissingExtraError: reading rows that were tiered needs the lake's libraries"
        " (pyiceberg is not installed): pip install 'pyspark-streamhouse[lake]'"
    )


def test_the_documented_examples_run_or_name_the_extra_that_their_text_names(
    light: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServiceProcess(tmp_path) as service:
        monkeypatch.setenv("STREAMHOUSE_ENDPOINT", service.endpoint)

        said = run(str(light / "python"), "-c", _EXAMPLES, str(ROOT / "docs" / "python.md"))

    assert said.split() == ["lake", "sql"]


@pytest.mark.parametrize("name", ["register", "sql", "Table", "cdc"])
def test_a_public_name_says_which_extra_it_needs(light: Path, name: str) -> None:
    program = f"try:\n    from streamhouse import {name}\nexcept ImportError as error: print(error)"

    said = run(str(light / "python"), "-c", program)

    assert said.startswith(f"streamhouse.{name} needs Spark")
    assert said.endswith("pip install 'pyspark-streamhouse[spark]'")


def test_the_command_line_marks_what_is_missing(light: Path, endpoint: str) -> None:
    said = run(str(light / "streamhouse"), "--help")

    assert "Run the storage service. [needs the extra 'server']" in said
    assert "streamhouse" in run(str(light / "streamhouse"), "--version")
    assert "shops" in run(str(light / "streamhouse"), "tables", "--endpoint", endpoint)


@pytest.mark.parametrize(
    ("command", "extra"),
    [("serve", "server"), ("backup", "server"), ("tier", "lake"), ("import", "lake")],
)
def test_a_command_says_which_extra_it_needs(light: Path, command: str, extra: str) -> None:
    done = start(str(light / "streamhouse"), command, "--help")

    assert done.returncode == 1
    assert done.stderr.startswith(f"streamhouse: 'streamhouse {command}' needs the ")
    assert done.stderr.endswith(f"pip install 'pyspark-streamhouse[{extra}]'\n")
