"""Rows as lines: one line a row, whatever the values are."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamhouse.cli.row_output import print_rows


def _printed(rows: pa.Table, *, is_json: bool = False) -> str:
    @click.command()
    def command() -> None:
        print_rows(rows.schema, rows.to_batches(), is_json=is_json, console=Console(file=None))

    done = CliRunner().invoke(command)
    assert done.exit_code == 0, done.exception
    return done.stdout


@given(st.lists(st.tuples(st.text(), st.none() | st.text(alphabet='"\\\t\n\ra '))))
def test_texts_come_back_from_lines(rows: list[tuple[str, str | None]]) -> None:
    table = pa.table({"a": [a for a, _ in rows], "b": pa.array([b for _, b in rows], pa.string())})

    header, *lines = _printed(table).removesuffix("\n").split("\n")

    assert header == "a\tb"
    fields = [tuple(line.split("\t")) for line in lines]
    assert len(fields) == len(rows)
    for texts, values in zip(fields, rows, strict=True):
        for text, value in zip(texts, values, strict=True):
            quoted = '"' + text.replace('"', '\\"') + '"'
            assert text == "NULL" if value is None else json.loads(quoted) == value


@pytest.mark.parametrize(
    ("value", "t", "text"),
    [
        (1, pa.int64(), "1"),
        (1.5, pa.float64(), "1.5"),
        (True, pa.bool_(), "true"),
        (Decimal("1.20"), pa.decimal128(9, 2), "1.20"),
        (b"\x01\xff", pa.binary(), "01ff"),
        (datetime.date(2026, 1, 31), pa.date32(), "2026-01-31"),
        (0, pa.timestamp("us", "UTC"), "1970-01-01T00:00:00Z"),
        (0, pa.timestamp("us"), "1970-01-01T00:00:00"),
        (["a", None], pa.list_(pa.string()), '["a", null]'),
        ({"x": 1}, pa.struct([("x", pa.int32())]), '{"x": 1}'),
        (7, pa.uint64(), "7"),
    ],
)
def test_a_value_is_written_as_in_the_http_api(value: Any, t: pa.DataType, text: str) -> None:
    rows = pa.table({"v": pa.array([value], t)})

    assert _printed(rows) == f"v\n{text}\n"
    assert json.loads(_printed(rows, is_json=True)).keys() == {"v"}
