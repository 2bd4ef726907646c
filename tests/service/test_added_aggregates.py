"""A column that is added to an aggregation table may have a function, from its first value on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    InvalidSchemaError,
    UnknownOptionError,
    UnsupportedError,
)
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("total", pa.int64())])
PROPERTIES = {"table.merge-engine": "aggregation", "fields.total.agg": "sum"}


def test_an_added_column_is_merged_by_its_function(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("sums", SCHEMA, primary_key=["k"], properties=PROPERTIES)
        client.upsert("sums", [{"k": 1, "total": 1}, {"k": 2, "total": 1}])
        client.add_column("sums", "most", "double", aggregate="max")
        client.alter_schema(
            "sums",
            [
                {"add": "texts", "type": "string", "aggregate": "listagg", "delimiter": "+"},
                {"add": "plain", "type": "string"},
            ],
        )
        at = ("--endpoint", service.endpoint)
        streamhouse("alter", "sums", "--add", "n int", "--aggregate", "count", *at)
        row = {"k": 1, "total": 1, "most": 1.5, "texts": "a", "plain": "p", "n": 9}
        client.upsert("sums", [row])
        client.upsert("sums", [row | {"most": float("nan"), "texts": "b", "plain": None}])
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.upsert("sums", [{**row, "most": 7.0, "texts": None, "n": None}])
        one, two = sorted(client.read("sums").to_pylist(), key=lambda row: int(row["k"]))
        assert str(one.pop("most")) == "nan"
        assert one == {"k": 1, "total": 4, "texts": "a+b", "plain": "p", "n": 2}
        assert set(two.values()) == {2, 1, None}
        client.drop_column("sums", "n", confirm="n")
        client.add_column("sums", "n", "int")
        assert "fields.n.agg" not in client.describe_table("sums").descriptor.properties


def test_what_is_no_function_of_a_new_column_is_refused(client: StorageClient) -> None:
    client.create_table("sums", SCHEMA, primary_key=["k"], properties=PROPERTIES)
    client.create_table("rows", SCHEMA, primary_key=["k"])
    with pytest.raises(InvalidSchemaError, match=r"sum of column 'name' needs a number"):
        client.add_column("sums", "name", "string", aggregate="sum")
    with pytest.raises(UnknownOptionError, match=r"'maxx' is not one of .*max"):
        client.add_column("sums", "most", "double", aggregate="maxx")
    with pytest.raises(InvalidSchemaError, match=r"fields\.n\.agg needs .* aggregation"):
        client.add_column("rows", "n", "int", aggregate="count")
    with pytest.raises(UnsupportedError, match=r"add_column\(\.\.\., aggregate=\.\.\.\)"):
        client.alter_properties("sums", updates={"fields.total.agg": "max"})
    assert client.describe_table("sums").schema_id == 0
