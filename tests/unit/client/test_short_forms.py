"""What is shown in a shell: short, and without what is secret."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse import (
    AppendWriter,
    AsyncStreamhouseClient,
    LogBatch,
    StreamhouseClient,
    TableBatch,
    TableInfo,
    TableScan,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath

COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def test_a_client_shows_where_it_asks_and_no_token() -> None:
    with StreamhouseClient("http://127.0.0.1:9", token="secret") as client:
        assert repr(client) == "StreamhouseClient('http://127.0.0.1:9')"


def test_an_asynchronous_client_shows_where_it_asks() -> None:
    client = AsyncStreamhouseClient("http://127.0.0.1:9", token="secret")

    assert repr(client) == "AsyncStreamhouseClient('http://127.0.0.1:9')"


def test_a_transaction_shows_its_table_and_id() -> None:
    with StreamhouseClient("http://127.0.0.1:9") as client:
        assert repr(client.open_transaction("db.t", "7-ab")) == "Transaction('db.t', 7-ab)"
        assert repr(client.open_transaction("t", "")) == "Transaction('default.t', skipped)"


def test_a_writer_shows_its_id() -> None:
    assert repr(AppendWriter(5)) == "AppendWriter(5)"


def test_a_table_shows_its_columns_and_key() -> None:
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(COLUMNS), primary_key=("id",)
    )

    assert repr(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)) == (
        "TableInfo('db.t', columns: id bigint NOT NULL, name string; primary key: id; buckets: 1)"
    )


def test_a_batch_shows_its_place_and_no_rows() -> None:
    rows = pa.record_batch({"id": [1, 2]})
    batch = LogBatch(bucket=3, base_offset=5, timestamp_us=0, data=rows, table="db.t")

    assert repr(batch) == "LogBatch('db.t', bucket 3, offsets 5 to 7)"


class _Notebook(HTMLParser):
    """Reads a table back: which tags it has, and the text of each cell."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(shown._repr_html_())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.tags.add(tag)
        if tag in ("caption", "td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["<script>alert(1)</script>", "&lt;", "'\"><b>", "</td></table>", "<!--", "&#60;"]
)


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_a_notebook_shows_rows_and_every_text_in_them_is_escaped(
    texts: list[str], name: str
) -> None:
    rows = pa.record_batch([pa.array(texts, pa.string())], [name])

    shown = _Notebook(LogBatch(bucket=3, base_offset=5, timestamp_us=0, data=rows, table="db.t"))

    assert shown.tags <= TAGS
    assert shown.cells[0].startswith("LogBatch('db.t', bucket 3, offsets 5 to")
    assert shown.cells[1:] == [name, *texts]


def test_a_notebook_shows_the_first_rows_of_many_and_dates_beyond_python() -> None:
    days = pa.array([0, None, 10_000_000, *[1] * 97], pa.date32())
    batch = TableBatch(
        bucket=0,
        offsets=pa.array(range(100)),
        timestamps=pa.array([0] * 100, pa.timestamp("us")),
        data=pa.record_batch({f"c{n}": days for n in range(60)}),
        token={},
        table="db.t",
    )

    shown = _Notebook(batch)

    assert shown.cells[0] == (
        "TableBatch('db.t', bucket 0, 100 rows); rows: the first 20 of 100;"
        " columns: the first 50 of 60"
    )
    assert len(shown.cells) == 1 + 50 * 21
    assert [shown.cells[at] for at in (51, 101)] == ["1970-01-01", "null"]
    assert shown.cells[151].startswith("29349")


def test_a_notebook_shows_the_columns_of_a_table_and_of_a_scan() -> None:
    columns = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.string(), metadata={"comment": "<b>who</b>"}),
        ]
    )
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(columns), primary_key=("id",)
    )

    table = _Notebook(TableInfo(descriptor=descriptor, table_id=1, created_at_us=0))
    scan = TableScan(COLUMNS, (batch for batch in ()))
    open_scan = _Notebook(scan)
    scan.close()

    assert table.tags == TAGS
    assert table.cells[0] == "table db.t; buckets: 1"
    assert table.cells[6:] == [
        *("id", "bigint", "NOT NULL", "primary key", ""),
        *("name", "string", "", "", "<b>who</b>"),
    ]
    assert open_scan.cells[0] == "TableScan; its rows come once: read_all(), read_pandas()"
    assert open_scan.cells[3:] == ["id", "int64", "name", "string"]
    assert _Notebook(scan).cells[0] == "TableScan; closed"
