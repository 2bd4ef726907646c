"""Tables and rows by the command line: create, load, head, query, follow, drop."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli import cli
from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

_TIMEOUT_S: Final = 60
_COMMAND: Final = (sys.executable, "-c", "from streamhouse.cli import main; main()")
_COLUMNS: Final = "id bigint not null, item string, price double"
_ROWS: Final = [
    {"id": 1, "item": "tea", "price": 3.5},
    {"id": 2, "item": 'jam, "sweet"\nand red', "price": None},
]
_CSV: Final = 'id,item,price\n1,tea,3.5\n2,"jam, ""sweet""\nand red",\n'


@pytest.fixture(autouse=True)
def _no_tables(client: StorageClient) -> None:
    """Every test begins without tables."""


def _run(service: ServiceProcess, *arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments), "--endpoint", service.endpoint])


def _document(service: ServiceProcess, *arguments: object) -> Any:
    done = _run(service, *arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def _rows(service: ServiceProcess, *arguments: object) -> list[dict[str, Any]]:
    done = _run(service, *arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _refusal(service: ServiceProcess, *arguments: object) -> str:
    done = _run(service, *arguments)
    assert isinstance(done.exception, StreamhouseError), (done.output, done.exception)
    return done.exception.message


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(_ROWS), path)
    elif path.suffix == ".ndjson":
        path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding="utf-8")
    else:
        path.write_text(_CSV, encoding="utf-8")
    return path


def test_a_table_is_made_as_described(service: ServiceProcess, client: StorageClient) -> None:
    made = _document(
        service,
        *("create", "shop.stock", "item string, left int", "--primary-key", "item"),
        *("--bucket-num", 2, "--property", "table.log.ttl=7d"),
    )

    table = client.describe_table("shop.stock")
    assert made == table.to_json()
    assert (table.descriptor.primary_key, table.bucket_count) == (("item",), 2)
    assert "exists" in _refusal(service, "create", "shop.stock", "item string")
    accepted = _run(service, "create", "shop.stock", "x int", "--if-not-exists")
    assert "exists with another definition" in str(accepted.exception)


@pytest.mark.parametrize("name", ["rows.csv", "rows.ndjson", "rows.parquet"])
@pytest.mark.parametrize("is_new", [False, True])
def test_files_of_each_format_are_loaded(
    service: ServiceProcess, tmp_path: Path, name: str, is_new: bool
) -> None:
    path = _file(tmp_path, name)
    if not is_new:
        assert _run(service, "create", "shop.orders", _COLUMNS).exit_code == 0

    loaded = _document(
        service, "load", "shop.orders", path, path, *(["--create"] if is_new else [])
    )

    assert loaded == {
        "table": "shop.orders",
        "is_created": is_new,
        "row_count": 4,
        "files": [str(path), str(path)],
    }
    rows = _rows(service, "head", "shop.orders")
    assert sorted(map(json.dumps, rows)) == sorted(map(json.dumps, [*_ROWS, *_ROWS]))


def test_a_load_of_a_key_table_upserts(service: ServiceProcess, tmp_path: Path) -> None:
    path = _file(tmp_path, "rows.csv")
    _document(service, "load", "shop.t", path, "--create", "--primary-key", "id")

    _document(service, "load", "shop.t", path)

    assert _rows(service, "query", "SELECT count(*) AS n FROM shop.t") == [{"n": 2}]
    (tmp_path / "part.csv").write_text("id,item\n1,oil\n", encoding="utf-8")
    message = _refusal(service, "load", "shop.t", tmp_path / "part.csv")
    assert "part.csv into 'shop.t': the file has no column: price, whose present values" in message


_BAD: Final = {
    "bad.csv": ("id,item,price\n1,tea,1\n2,jam,x\n", "line 3, column 'price': 'x' is no double"),
    "short.csv": ("id,item,price\n1,tea,1\n2,jam\n", "line 3 is no CSV: Expected 3 columns"),
    "null.csv": ("id,item\n1,tea\n,jam\n", "line 3, column 'id': "),
    "other.csv": ("id,itm\n1,tea\n", "no column 'itm'; did you mean 'item'?"),
    "empty.csv": ("", "the file is empty, and CSV begins with the names"),
    "bad.ndjson": ('{"id": 1}\n\n{"id": "a"}\n', "line 3, column 'id': "),
    "none.ndjson": ('{"id": 1}\n[]\n', "line 2 "),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_file_with_a_bad_row_is_refused_as_a_whole(
    service: ServiceProcess, tmp_path: Path, name: str
) -> None:
    text, problem = _BAD[name]
    good, path = _file(tmp_path, f"good.{name.partition('.')[2]}"), tmp_path / name
    path.write_text(text, encoding="utf-8")
    _run(service, "create", "shop.orders", _COLUMNS)

    message = _refusal(service, "load", "shop.orders", good, path)

    assert message.startswith(f"{path} into 'shop.orders': ")
    assert problem in message
    assert message.endswith("nothing was written")
    assert _rows(service, "head", "shop.orders") == []


@pytest.mark.parametrize("key", [(), ("--primary-key", "id"), ("--bucket-key", "id")])
@pytest.mark.parametrize("suffix", ["csv", "ndjson", "parquet"])
def test_a_row_that_breaks_a_constraint_has_its_place(
    service: ServiceProcess, tmp_path: Path, suffix: str, key: tuple[str, ...]
) -> None:
    """The service counts rows in each bucket, and sees a later row first."""
    path = tmp_path / f"rows.{suffix}"
    rows = [{"id": number, "left": -1 if number > 5 else 5} for number in range(9)]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "csv":
        path.write_text("id,left\n" + "".join(f"{r['id']},{r['left']}\n" for r in rows))
    else:
        path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    check = ("--property", "table.check.some=left > 0")
    _run(service, "create", "shop.t", "id bigint, left int", "--bucket-num", 3, *check, *key)

    message = _refusal(service, "load", "shop.t", path)

    place = "row 7" if suffix == "parquet" else "line 8"
    assert message.startswith(f"{path} into 'shop.t': {place} breaks constraint 'some', CHECK (")
    assert message.endswith("nothing was written")
    assert _rows(service, "head", "shop.t") == []


def test_fields_may_have_other_delimiters(service: ServiceProcess, tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("id\titem\n1\ttea, green\n", encoding="utf-8")
    form = ("--format", "csv", "--delimiter", "tab")

    _document(service, "load", "shop.t", path, "--create", *form)

    assert _rows(service, "head", "shop.t") == [{"id": 1, "item": "tea, green"}]
    done = _run(service, "load", "shop.t", path, "--format", "csv", "--delimiter", "::")
    assert done.exit_code == 2
    assert "'::' is not one ASCII character" in done.output
    done = _run(service, "load", "shop.t", path, "--format", "ndjson", "--delimiter", ";")
    assert "--delimiter is of CSV" in done.output


def test_a_bad_row_of_parquet_has_a_number(service: ServiceProcess, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"id": [1, 2, None], "item": ["a", "b", "c"]}), path)
    _run(service, "create", "shop.orders", _COLUMNS)

    message = _refusal(service, "load", "shop.orders", path)

    assert message.startswith(f"{path} into 'shop.orders': row 3, column 'id': ")


def test_a_table_of_a_refused_load_is_not_made(
    service: ServiceProcess, client: StorageClient, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,item\n,tea\n", encoding="utf-8")

    _refusal(service, "load", "shop.t", path, "--create", "--primary-key", "id")

    assert client.list_tables() == []


def test_rows_without_a_terminal_are_lines_of_tabs(service: ServiceProcess, tmp_path: Path) -> None:
    _run(service, "load", "shop.orders", _file(tmp_path, "rows.csv"), "--create")

    done = _run(service, "query", "SELECT * FROM shop.orders ORDER BY id")

    assert done.stdout == ('id\titem\tprice\n1\ttea\t3.5\n2\tjam, "sweet"\\nand red\tNULL\n')
    one = _rows(service, "head", "shop.orders", "--columns", "item", "--where", "id = 1")
    assert one == [{"item": "tea"}]


@pytest.mark.parametrize("answer", [b"n\n", b"y\n"])
def test_tables_are_dropped_after_a_question(
    service: ServiceProcess, client: StorageClient, answer: bytes
) -> None:
    for path in ("notes", "shop.a"):
        client.create_table(path, "id int")
    terminal, other_end = pty.openpty()
    try:
        os.write(terminal, answer)
        done = subprocess.run(
            [*_COMMAND, "drop", "notes", "shop.a", "--endpoint", service.endpoint],
            stdin=other_end,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(other_end)

    assert "Drop default.notes, shop.a? [y/N]" in done.stdout
    assert client.list_tables() == (["default.notes", "shop.a"] if answer == b"n\n" else [])


def test_nothing_is_dropped_where_nobody_can_answer_or_a_table_is_missing(
    service: ServiceProcess, client: StorageClient
) -> None:
    client.create_table("shop.a", "id int")

    assert "give --yes" in _run(service, "drop", "shop.a").output
    assert "'shop.b'" in _refusal(service, "drop", "shop.a", "shop.b", "--yes")
    assert client.list_tables() == ["shop.a"]
    dropped = _document(service, "drop", "shop.a", "shop.b", "--if-exists", "--yes")
    assert dropped == {"dropped": ["shop.a"]}
    assert _document(service, "drop", "--database", "shop", "--yes") == {"dropped": ["shop"]}
    assert "shop" not in client.list_databases()


@pytest.fixture
def follow(service: ServiceProcess) -> Iterator[subprocess.Popen[str]]:
    """`streamhouse follow shop.stock`, of which the row of tea is there."""
    with StreamhouseClient(service.endpoint) as client:
        client.create_table("shop.stock", "item string, left int", primary_key="item")
        client.upsert("shop.stock", {"item": "tea", "left": 1})
        with subprocess.Popen(
            [*_COMMAND, "follow", "shop.stock", "--start", "earliest", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STREAMHOUSE_ENDPOINT": service.endpoint},
        ) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {
                "__change_type": "+I",
                "item": "tea",
                "left": 1,
            }
            try:
                yield process
            finally:
                process.kill()


def test_follow_prints_rows_as_they_arrive_until_an_interrupt(
    follow: subprocess.Popen[str], client: StorageClient
) -> None:
    client.upsert("shop.stock", {"item": "jam", "left": 2})
    assert follow.stdout is not None
    assert json.loads(follow.stdout.readline())["item"] == "jam"

    follow.send_signal(signal.SIGINT)

    _, errors = follow.communicate(timeout=_TIMEOUT_S)
    assert (follow.returncode, errors.strip()) == (130, "")


def test_follow_ends_with_its_reader_although_no_row_comes(follow: subprocess.Popen[str]) -> None:
    assert follow.stdout is not None
    assert follow.stderr is not None
    follow.stdout.close()

    assert (follow.wait(_TIMEOUT_S), follow.stderr.read()) == (141, "")


def test_follow_ends_after_so_many_rows(service: ServiceProcess, tmp_path: Path) -> None:
    _run(service, "load", "shop.orders", _file(tmp_path, "rows.csv"), "--create")

    done = _run(service, "follow", "shop.orders", "--start", "earliest", "--rows", 1)

    assert done.stdout == "id\titem\tprice\n1\ttea\t3.5\n"
