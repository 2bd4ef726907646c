"""A service with readers, and a connection that tells which process answered.

A connection moves to a reader after some lookups, once the reader holds the table; nothing tells a
client so, besides the first part of the request id, which each process chooses for itself.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

__all__ = ["RowConnection", "reader_pids"]


class RowConnection:
    """One kept connection that gets rows of a table; `who` is the process that answered last."""

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
        self.answer_count = 0
        """How many rows were answered."""

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request to a path of the table; return status and body."""
        self._connection.request(
            method, f"/v1/tables/{self._table}{path}", body, {**self._headers, **(headers or {})}
        )
        answer = self._connection.getresponse()
        content = answer.read()
        self.who = (answer.headers["x-request-id"] or "").partition("-")[0]
        return answer.status, content

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
        self.row(key)
        owner = self.who

        def has_moved() -> bool:
            # A move is decided after some lookups in a row.
            for _ in range(20):
                self.row(key)
            return self.who != owner

        wait_until(has_moved, "a connection that moved to a reader")
        return self.who

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def reader_pids(service: ServiceProcess) -> list[int]:
    """Return the processes of the readers."""
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text("ascii").split()
    return [
        int(pid)
        for pid in children
        if b"_reader_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
