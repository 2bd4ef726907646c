"""pondra (PyPI): a streaming lakehouse that is one compiled binary, as a peer for small calls.

A node runs on a folder, on loopback, with what it does by default: it acknowledges when a write is
in a file, without fsync, and tiers every ten seconds. `lookup_one` is by its own Python client, the
other calls go over one kept connection of `http.client`, which is faster than that client, with
what that client sends: Arrow, numbered for exactly once.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import itertools
import json
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["Pondra", "arrow_stream", "follow", "is_installed", "row_prefix", "write_paths"]

_SQL_TYPES = {
    pa.int64(): "BIGINT",
    pa.string(): "VARCHAR",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}


def is_installed() -> bool:
    """Return whether the extra `peers` is."""
    return importlib.util.find_spec("pondra") is not None


def row_prefix(table: str) -> str:
    """Return the path of a row without its key."""
    return f"/lookup/{table}/"


def write_paths(table: str, *, producer: str) -> Iterator[str]:
    """Yield the paths of a producer's writes; with a primary key, a write replaces rows."""
    for sequence in itertools.count(1):
        yield f"/append/{table}?producer={producer}&seq={sequence}"


def arrow_stream(rows: pa.Table) -> bytes:
    """Return rows as an Arrow stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue()


class Pondra:
    """One node; entering starts it and waits until it answers, leaving ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Iterator[str]] = {}

    def __enter__(self) -> Pondra:
        import pondra

        # Else it keeps a copy in the machine's directory of temporary files.
        flags = ("--cache-dir", f"{self._folder}-cache")
        self._client = pondra.local(str(self._folder), python=False, flags=flags)
        self._log = (
            Path(tempfile.gettempdir()) / f"pondra-{self._client.url.rpartition(':')[2]}.log"
        )
        self._connection = http.client.HTTPConnection(self._client.url.removeprefix("http://"))
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._client.close()
        with contextlib.suppress(FileNotFoundError):
            self._log.unlink()

    @property
    def pid(self) -> int:
        return int(self._client.process.pid)

    @property
    def endpoint(self) -> str:
        return str(self._client.url)

    def create_table(self, table: str, schema: pa.Schema, *, primary_key: str = "") -> None:
        """Create a table; with a primary key, `write` replaces rows."""
        columns = ", ".join(
            f"{f.name} {_SQL_TYPES[f.type]}{' PRIMARY KEY' if f.name == primary_key else ''}"
            for f in schema
        )
        self._client.sql(f"CREATE TABLE {table} ({columns})")

    def write(self, table: str, rows: pa.Table) -> None:
        """Append rows, or upsert them if the table has a primary key."""
        paths = self._paths.get(table)
        if paths is None:
            paths = self._paths[table] = write_paths(table, producer="benchmark")
        self._ask("POST", next(paths), arrow_stream(rows), "application/vnd.apache.arrow.stream")

    def lookup_one(self, table: str, key: int) -> dict[str, Any] | None:
        """Return the row with a key, by pondra's Python client."""
        row: dict[str, Any] | None = self._client.lookup(table, key)
        return row

    def lookup_one_kept(self, table: str, key: int) -> dict[str, Any]:
        """Return the row with a key, over the kept connection."""
        (row,) = json.loads(self._ask("GET", f"{row_prefix(table)}{key}"))
        return dict(row)

    def lookup(self, table: str, keys: Sequence[int]) -> pa.Table:
        """Return the rows with these keys in any order: by SQL, its fastest way to many rows."""
        text = f"SELECT * FROM {table} WHERE id IN ({', '.join(map(str, keys))})"
        answer = self._ask("POST", "/sql?format=arrow", text.encode(), "text/plain")
        return pa.ipc.open_stream(answer).read_all()

    def _ask(self, method: str, path: str, body: bytes = b"", content_type: str = "") -> bytes:
        headers = {"content-type": content_type} if body else {}
        self._connection.request(method, path, body or None, headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer


def follow(endpoint: str, table: str) -> Iterator[dict[str, Any] | None]:
    """Yield None when rows that are written from now on will come, then each of them."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("GET", f"/watch/{table}?marks=true")
    response = connection.getresponse()
    yield None
    for line in response:
        row = json.loads(line)
        if "_after" not in row:
            yield row
