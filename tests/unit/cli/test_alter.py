"""`streamhouse alter`: what it is told becomes changes of the schema."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath

_REFUSAL = b'{"error": {"code": "forbidden", "message": "not you"}}'


class _Asked(BaseHTTPRequestHandler):
    """Keeps the changes that it is asked for, and refuses them."""

    changes: list[Any]
    status = 403
    answer = _REFUSAL

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.changes += json.loads(body)["changes"]
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _served(**answer: Any) -> Iterator[tuple[str, list[Any]]]:
    changes: list[Any] = []
    handler = type("_Kept", (_Asked,), {"changes": changes, **answer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", changes
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def asked() -> Iterator[tuple[str, list[Any]]]:
    """Return the endpoint of a service, and the list of what it was asked for."""
    with _served() as served:
        yield served


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        (["--widen", "size", "bigint"], {"widen": ["size"], "to": "bigint"}),
        (
            ["--widen", "place.spots.element.x", "decimal(9, 2)"],
            {"widen": ["place", "spots", "element", "x"], "to": "decimal(9, 2)"},
        ),
        (["--widen", "`a.b`.c", "double"], {"widen": ["a.b", "c"], "to": "double"}),
        (["--rename", "a.b", "c"], {"rename": "a.b", "to": "c"}),
    ],
)
def test_a_dot_leads_into_a_column(
    arguments: list[str], change: dict[str, Any], asked: tuple[str, list[Any]]
) -> None:
    endpoint, changes = asked

    CliRunner().invoke(cli, ["alter", "db.t", *arguments, "--endpoint", endpoint])

    assert changes == [change]


def test_the_new_columns_are_printed_as_create_prints_them() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("item", pa.string())])
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=Schema.from_arrow(schema),
        primary_key=("id",),
        bucket_count=1,
    )
    table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    with _served(status=200, answer=json.dumps(table.to_json()).encode()) as (endpoint, _):
        arguments = ["alter", "db.t", "--drop-not-null", "item", "--endpoint", endpoint]
        done = CliRunner().invoke(cli, arguments)

    assert done.output.endswith(": id bigint not null, item string; primary key id\n")


def test_a_property_without_a_value_names_its_option() -> None:
    done = CliRunner().invoke(cli, ["alter", "db.t", "--set", "table.log.ttl"])

    assert "--set 'table.log.ttl' must be KEY=VALUE" in str(done.exception)
    done = CliRunner().invoke(cli, ["create", "db.t", "id int", "--property", "table.log.ttl"])
    assert "--property 'table.log.ttl' must be KEY=VALUE" in str(done.exception)
