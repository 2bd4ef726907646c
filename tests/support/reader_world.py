"""A service with readers, and connections that tell which process answered.

A connection moves to a reader after some reads, once the reader holds the table; nothing tells a
client so, besides the first part of the request id, which each process chooses for itself.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import urllib3

from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

__all__ = ["NO_LAKE", "SCHEMA", "LogConnection", "RowConnection", "reader_pids", "rows"]

SCHEMA: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())]
)
NO_LAKE: Final = {"table.datalake.enabled": "false"}


def rows(*ids: int, name: str = "first") -> pa.Table:
    """Return rows with these ids, and the same name."""
    return pa.table({"id": list(ids), "name": [name] * len(ids)}, schema=SCHEMA)


class _Connection:
    """One kept connection that reads a table; `who` is the process that answered last."""

    def __init__(
        self,
        service: ServiceProcess,
        table: str,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> None:
        self._address = service.endpoint.removeprefix("http://")
        self._table = table
        self._headers = headers or {}
        self._connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        self.who = ""

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request to a path of the table; return status and body."""
        answer = self.open(method, path, body=body, headers=headers)
        return answer.status, answer.read()

    def open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request to a path of the table; return the answer, whose body follows."""
        self._connection.request(
            method, f"/v1/tables/{self._table}{path}", body, {**self._headers, **(headers or {})}
        )
        answer = self._connection.getresponse()
        self.who = (answer.headers["x-request-id"] or "").partition("-")[0]
        return answer

    def _move(self, read: Callable[[], object]) -> str:
        """Read until another process answers; return that process."""
        read()
        owner = self.who

        def has_moved() -> bool:
            # A move is decided after some reads in a row.
            for _ in range(20):
                read()
            return self.who != owner

        wait_until(has_moved, "a connection that moved to a reader")
        return self.who

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class RowConnection(_Connection):
    """A connection that gets rows by key."""

    answer_count = 0
    """How many rows were answered."""

    def row(self, key: object) -> dict[str, Any] | None:
        """Return the row of a key, None if there is none."""
        status, content = self.request("GET", f"/rows/{key}")
        if status == 404 and json.loads(content)["error"]["code"] == "row_not_found":
            return None
        assert status == 200, content
        self.answer_count += 1
        row: dict[str, Any] = json.loads(content)
        return row

    def move(self, key: object = 0) -> str:
        """Get a row until another process answers; return that process."""
        return self._move(lambda: self.row(key))


class LogConnection(_Connection):
    """A connection that fetches rows of a log, as lines of JSON."""

    known_id: int | None = None
    """The table's id, asked for once unless a caller sets it."""

    def fetch(self, offset: int, *, bucket: int = 0, **parameters: object) -> tuple[int, bytes]:
        """Fetch rows from `offset` on; return status and body."""
        if offset:
            # An offset is of one table of this name.
            parameters = {"table_id": self.table_id(), **parameters}
        query = urllib.parse.urlencode({"offset": offset, **parameters})
        return self.request(
            "GET",
            f"/buckets/{bucket}/fetch?{query}",
            headers={"accept": "application/x-ndjson"},
        )

    def table_id(self) -> int:
        """Return the table's id, asked once."""
        if self.known_id is None:
            url = f"http://{self._address}/v1/tables/{self._table}"
            self.known_id = urllib3.request("GET", url, headers=self._headers).json()["table_id"]
        return self.known_id

    def ids(self, offset: int, *, bucket: int = 0, **parameters: object) -> list[int]:
        """Return the values of column `id` of the rows from `offset` on."""
        status, content = self.fetch(offset, bucket=bucket, **parameters)
        assert status == 200, content
        return [json.loads(line)["id"] for line in content.splitlines()]

    def move(self, path: str = "/buckets/0/fetch?offset=0") -> str:
        """Get a path of the table until another process answers; return that process."""
        return self._move(lambda: self.request("GET", path))


def reader_pids(service: ServiceProcess) -> list[int]:
    """Return the processes of the readers."""
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text("ascii").split()
    return [
        int(pid)
        for pid in children
        if b"_reader_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
