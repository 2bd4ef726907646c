"""Bad input in real Spark: one clear sentence, last, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from integration.spark_world import SparkWorld, last_line, world
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        call()
    return last_line(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"colums": "id"}, r"\[unknown_option\] unknown option 'colums'; did you mean 'columns'\?"),
        ({"columns": "id,reigon"}, r"has no column 'reigon'; did you mean 'region'\?"),
        ({"where": "id ="}, r"\[invalid_predicate\]"),
        ({"startingOffsets": '{"0": 99}'}, r"offset 99, but the valid range is \[0, 5\]"),
        ({"asOfSnapshot": "42"}, r"no lake snapshot yet|has no snapshot 42"),
        ({"bucket.num": "5"}, r"'bucket.num' has no meaning for a batch read"),
    ],
)
def test_options(world: SparkWorld, options: dict[str, str], sentence: str) -> None:
    path = world.table(rows=5)

    line = _message(lambda: world.load(path, **options).count())

    assert re.search(sentence, line), line


def test_names(world: SparkWorld) -> None:
    path = world.table(rows=5)

    assert "table 'default.nope' does not exist" in _message(lambda: world.load("default.nope"))
    assert "no part '$lak'; did you mean 'lake'" in _message(lambda: world.load(f"{path}$lak"))
    assert "is not a table path" in _message(lambda: world.load("a.b.c"))
    assert "call load(" in _message(lambda: world.reader().load())


def test_a_wrong_type_in_the_schema(world: SparkWorld) -> None:
    path = world.table(rows=5)

    line = _message(lambda: world.reader().schema("id string").load(path).count())

    assert "column 'id' is bigint, but .schema(...) asks for string" in line


def test_a_column_that_was_widened_after_the_load(world: SparkWorld) -> None:
    path = world.table(rows=5)
    loaded = world.load(path)
    world.client.widen_column(path, "price", "decimal(20,2)")

    line = _message(loaded.where("id > 1").count)

    assert "'price' was decimal(12,2) when the table was loaded, and is decimal(20,2)" in line
    assert "now: load it again" in line
    assert world.load(path).where("price > 1").count() == 3


def test_a_service_that_is_not_there(world: SparkWorld) -> None:
    nowhere = "http://127.0.0.1:9"

    line = _message(lambda: world.reader().option("endpoint", nowhere).load("default.t"))

    assert nowhere in line
    assert "streamhouse serve" in line


def test_a_failing_task_reports_one_sentence(world: SparkWorld) -> None:
    """The table goes away between planning and reading: the task fails, by name."""
    path = world.table(rows=5)
    frame = world.load(path)
    frame.count()
    world.client.drop_table(path)

    line = _message(lambda: frame.count())

    assert f"table '{path}'" in line
    assert "Traceback" not in line


def test_a_token_is_needed_and_reaches_the_executors(world: SparkWorld, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right-token")
    (tmp_path / "token").chmod(0o600)
    arguments = ("--token-file", str(tmp_path / "token"))
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        with StreamhouseClient(service.endpoint, token="right-token") as client:
            client.create_table("secret", pa.schema([("id", pa.int64())]))
            client.append("secret", pa.table({"id": range(50)}))
            tier_once(client, "secret", token="right-token")
            client.append("secret", pa.table({"id": range(50, 60)}))

        def reader(token: str) -> DataFrame:
            return world.reader().options(endpoint=service.endpoint, token=token).load("secret")

        line = _message(lambda: reader("wrong-token"))
        assert "[unauthorized]" in line
        assert "wrong-token" not in line
        assert reader("right-token").count() == 60


def test_a_token_never_shows(world: SparkWorld) -> None:
    path = world.table(rows=5)

    frame = world.load(path, token="very-secret-token")

    plan = frame._jdf.queryExecution().toString()
    assert "very-secret-token" not in plan
    assert frame.count() == 5
