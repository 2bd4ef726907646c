"""The columns of a table that is made for files."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.cli.loading.column_types import schema_of_files
from streamhouse.cli.loading.row_files import FileFormat, RowFile, ignored
from streamhouse.core.errors import InvalidRequestError, InvalidSchemaError
from streamhouse.core.model.schema import Schema, type_name
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath


def _types(
    path: Path, text: str, file_format: FileFormat = "csv", delimiter: str | None = None
) -> dict[str, str]:
    path.write_text(text, encoding="utf-8")
    schema = schema_of_files([RowFile(path, file_format, delimiter)])
    return {field.name: type_name(field.type) for field in schema}


def _table(schema: pa.Schema) -> TableInfo:
    descriptor = TableDescriptor(
        path=TablePath.parse("t"), schema=Schema.from_arrow(schema), bucket_count=1
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (["1", "-2", ""], "bigint"),
        (["1", "2.5"], "double"),
        (["1", "9223372036854775808"], "string"),
        (["9007199254740993", "-9007199254740993"], "bigint"),
        (["9007199254740993", "0.5"], "string"),
        (["0.5", "-9007199254740993"], "string"),
        (["9007199254740991", "0.5"], "double"),
        (["1e300", "0.5"], "double"),
        (["01234", "98765"], "string"),
        (["0", "0.5"], "double"),
        (["true", "false"], "boolean"),
        (["1", "true"], "boolean"),
        (["2026-01-31", ""], "date"),
        (["2026-01-31T10:00:00Z"], "timestamp"),
        (["2026-01-31 10:00:00"], "timestamp"),
        (["2026-01-31", "soon"], "string"),
        (["", ""], "string"),
    ],
)
def test_a_column_of_csv_has_the_first_type_of_all_its_texts(
    tmp_path: Path, texts: list[str], name: str
) -> None:
    body = "".join(f"{text},z\n" for text in texts)

    assert _types(tmp_path / "f.csv", f"x,y\n{body}") == {"x": name, "y": "string"}


_TEXT = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(["", "true", "False", "0", "1", "007", "-0", "1e400", "0x1f", " 5", "inf"]),
    st.dates().map(str),
    st.datetimes().map(str),
    st.datetimes(timezones=st.just(datetime.UTC)).map(datetime.datetime.isoformat),
    st.text(max_size=5).filter(lambda text: "\0" not in text),
)


@given(st.lists(_TEXT, min_size=1, max_size=6))
def test_the_columns_take_every_row_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.csv"
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["x"], *([text] for text in texts)])
    source = RowFile(path, "csv")

    rows = [*source.rows(_table(schema_of_files([source])), ignored)]

    assert sum(part.rows.num_rows for part in rows) == len(texts)


def test_ndjson_joins_the_types_of_all_lines(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "price": 2, "at": "2026-01-31T10:00:00", "tags": [], "none": None},
        {"id": 2, "price": 2.5, "at": None, "tags": ["a"], "extra": {"x": True}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)

    assert _types(tmp_path / "f.ndjson", text, "ndjson") == {
        "id": "bigint",
        "price": "double",
        "at": "timestamp",
        "tags": "array<string>",
        "none": "string",
        "extra": "struct<x:boolean>",
    }


@pytest.mark.parametrize(
    ("lines", "column"),
    [
        (['{"a": 9007199254740993}', '{"a": 0.5}'], "a"),
        (['{"a": -9007199254740993, "b": 0.5}', '{"a": 0.5}'], "a"),
        (['{"a": 9223372036854775808}'], "a"),
        (['{"a": {"b": [{"c": 0.5}, {"c": 9007199254740993}]}}'], "a.b.c"),
        (['{"é": [0.5, 9007199254740993, 1]}'], "é"),
        (['{"\\u00e9": [0.5, 9007199254740993]}'], "é"),
        (['{"a": 9007199254740993}'] * 70_000 + ['{"a": 0.5}'], "a"),
        (['{"a": 0.5}'] * 70_000 + ['{"a": 9007199254740993}'], "a"),
        (['{"a": 1e300, "b": 9007199254740993}', '{"a": 0.5}'], None),
        (['{"a": 9007199254740991}', '{"a": 0.5}'], None),
    ],
)
def test_whole_numbers_of_ndjson_are_not_rounded(
    tmp_path: Path, lines: list[str], column: str | None
) -> None:
    text = "\n".join(lines)
    if column is None:
        assert _types(tmp_path / "f.ndjson", text, "ndjson")["a"] == "double"
        return
    with pytest.raises(InvalidSchemaError, match=f"column '{column}' has whole numbers from 2"):
        _types(tmp_path / "f.ndjson", text, "ndjson")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"x,y\n1,a\n2,\xe9t\xe9\n", "line 3"),
        (b"\xe9,y\n1,a\n", "line 1, the header,"),
        (b"x,y\n" + b"1,a\n" * 70_000 + b"2,\xe9\n", "line 70002"),
        (b'{"x": 1, "y": ""}\n\n{"x": 1, "y": "\xe9"}\n', "line 3"),
        (b'{"x": 1, "y": ""}\n' * 70_000 + b'{"x": 1, "y": "\xe9"}\n', "line 70001"),
    ],
)
def test_bytes_outside_of_utf8_are_one_sentence(tmp_path: Path, body: bytes, line: str) -> None:
    file_format: FileFormat = "ndjson" if body.startswith(b"{") else "csv"
    path = tmp_path / "f.txt"
    path.write_bytes(body)
    source = RowFile(path, file_format)
    table = _table(pa.schema([("x", pa.int64()), ("y", pa.string())]))

    with pytest.raises(InvalidRequestError) as new:
        schema_of_files([source])
    with pytest.raises(InvalidRequestError) as existing:
        [*source.rows(table, ignored)]

    reason = f"{line} is not UTF-8; convert the text to UTF-8, as 'iconv -f latin1 -t utf-8' does"
    assert new.value.message == f"{path}: {reason}"
    message = existing.value.message.removesuffix("; nothing was written")
    assert message == f"{path} into 'default.t': {reason}"


@pytest.mark.parametrize(
    ("delimiter", "words"),
    [
        (";", "semicolons and no commas: give --delimiter ';'"),
        ("\t", "tabs and no commas: give --delimiter tab"),
        ("|", "bars and no commas: give --delimiter '|'"),
    ],
)
def test_another_delimiter_is_named_and_taken(tmp_path: Path, delimiter: str, words: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text('x;y\n1;"a;""b,"\n2;c\n'.replace(";", delimiter), encoding="utf-8")
    table = _table(pa.schema([("x", pa.int64()), ("y", pa.string())]))

    for read in (
        lambda: schema_of_files([RowFile(path, "csv")]),
        lambda: [*RowFile(path, "csv").rows(table, ignored)],
    ):
        with pytest.raises(InvalidRequestError, match=r"f\.csv.*: line 1 has ") as refused:
            read()
        assert words in refused.value.message

    source = RowFile(path, "csv", delimiter)
    assert schema_of_files([source]) == table.schema.to_arrow()
    (part,) = source.rows(table, ignored)
    texts = [f'a{delimiter}"b,', "c"]
    assert part.rows.to_pydict() == {"x": [1, 2], "y": texts}
    assert part.place(1) == "line 3"


def test_a_single_column_may_have_a_delimiter_in_its_name(tmp_path: Path) -> None:
    assert _types(tmp_path / "f.csv", "a|b\n1\n", "csv", ",") == {"a|b": "bigint"}


def test_a_column_with_two_types_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidSchemaError, match=r"f\.ndjson, line 3: Column\(/id\) changed"):
        _types(tmp_path / "f.ndjson", '{"id": 1}\n{"id": 2}\n{"id": "x"}\n', "ndjson")


def test_parquet_has_its_types(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    rows = pa.table(
        {
            "a": pa.array([1], pa.uint32()),
            "b": pa.array(["x"]).dictionary_encode(),
            "c": pa.array([0], pa.timestamp("ns")),
            "d": pa.array([1], pa.decimal128(9, 2)),
        }
    )
    pq.write_table(rows, path)
    source = RowFile(path, "parquet")

    schema = schema_of_files([source])

    assert [type_name(field.type) for field in schema] == [
        *("bigint", "string", "timestamp_ntz", "decimal(9,2)")
    ]
    (part,) = source.rows(_table(schema), ignored)
    assert part.rows.to_pylist()[0]["b"] == "x"


@pytest.mark.parametrize("file_format", ["csv", "ndjson", "parquet"])
def test_a_file_that_is_no_such_file_is_a_sentence(tmp_path: Path, file_format: FileFormat) -> None:
    path = tmp_path / "rows.gz"
    path.write_bytes(b"\xff\xfe not at all")

    with pytest.raises(InvalidRequestError, match=r"rows\.gz"):
        schema_of_files([RowFile(path, file_format)])
