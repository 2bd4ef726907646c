"""`streamhouse alter`: what it is told becomes changes of the schema."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from streamhouse.cli import cli

_REFUSAL = b'{"error": {"code": "forbidden", "message": "not you"}}'


class _Asked(BaseHTTPRequestHandler):
    """Keeps the changes that it is asked for, and refuses them."""

    changes: list[Any]

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.changes += json.loads(body)["changes"]
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_REFUSAL)))
        self.end_headers()
        self.wfile.write(_REFUSAL)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def asked() -> Iterator[tuple[str, list[Any]]]:
    """Return the endpoint of a service, and the list of what it was asked for."""
    changes: list[Any] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Kept", (_Asked,), {"changes": changes}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", changes
    server.shutdown()
    thread.join()
    server.server_close()


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
