"""Every command that speaks to a service takes a token from a file, and sends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.cli.settings import leaves_of

_REFUSAL = b'{"error": {"code": "forbidden", "message": "not you"}}'


def _commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        for leaf in {command, *leaves_of(command)}:
            yield f"{name} {leaf.name}", leaf


class _Refusing(BaseHTTPRequestHandler):
    """Refuses every request, and keeps the tokens."""

    tokens: set[str | None]

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.tokens.add(self.headers["Authorization"])
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_REFUSAL)))
        self.end_headers()
        self.wfile.write(_REFUSAL)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _refuse

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[tuple[str, set[str | None]]]:
    handler = type("_Handler", (_Refusing,), {"tokens": set[str | None]()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.tokens  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _token_file(folder: Path) -> str:
    file = folder / "token"
    file.write_text("a-token-of-a-file\n")
    file.chmod(0o600)
    return str(file)


def test_who_takes_an_endpoint_takes_a_token_file() -> None:
    lacking = []
    for name, command in _commands():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if "--endpoint" in flags and "--token-file" not in flags:
            lacking.append(name)

    assert not lacking


@pytest.mark.parametrize(
    "arguments",
    [
        ["tables"],
        ["tables", "a.b"],
        ["tables", "--sizes"],
        ["top", "--once"],
        ["consumers"],
        ["consumers", "a.b", "--forget", "x"],
        ["rejected", "show", "a.b"],
        ["rejected", "replay", "a.b"],
        ["shards"],
        ["shards", "move", "a.b", "--to", "1"],
        ["alter", "a.b", "--set", "x=y"],
        ["alter", "a.b", "--drop-not-null", "x"],
        ["adopt", "a.b", "--yes"],
        ["maintain", "a.b"],
    ],
    ids=" ".join,
)
def test_the_token_in_the_file_is_sent(
    arguments: list[str], refusing: tuple[str, set[str | None]], tmp_path: Path
) -> None:
    endpoint, tokens = refusing
    given = ["--endpoint", endpoint, "--token-file", _token_file(tmp_path)]

    done = CliRunner().invoke(cli, [*arguments, *given])

    assert "not you" in str(done.exception)
    assert tokens == {"Bearer a-token-of-a-file"}


def test_options_before_the_subcommand_count(
    refusing: tuple[str, set[str | None]], tmp_path: Path
) -> None:
    endpoint, tokens = refusing
    given = ["--endpoint", endpoint, "--token-file", _token_file(tmp_path)]

    CliRunner().invoke(cli, ["shards", *given, "move", "a.b", "--to", "1"])

    assert tokens == {"Bearer a-token-of-a-file"}


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tables", "--token-file", str(tmp_path / "none")])

    assert "none" in str(done.exception)
