"""Reads that any process of a service may answer: which process is next, and what is the least.

With `read_from=any` lookups go to the listed endpoints in turn. Each request names the least that
its answer must include: the client's own writes and what it has read before, by table and bucket.
So a client never reads what is older than its own writes, and never goes back. Fetches of rows that
exist go to the endpoints in turn as well.

A process that does not answer, or not for a table, is left alone for a while. The owner is always
the last to be asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Final

from streamhouse.client.http.endpoint import Endpoints
from streamhouse.core.backoff import Backoff
from streamhouse.core.model.offsets import (
    INCLUDED_HEADER,
    Offset,
    buckets_to_json,
    offsets_from_json,
    table_of_offsets,
)
from streamhouse.core.model.table import TableInfo

__all__ = ["AnyProcess"]

_LEFT_ALONE: Final = Backoff(first_s=0.5, most_s=30.0)
# The offsets of more buckets would make long requests.
_BUCKETS_MAX: Final = 256


class AnyProcess:
    """The reads of one client. Thread-safe."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._urls: Final = endpoints.urls
        self.is_used: Final = endpoints.read_from == "any" and len(endpoints.urls) > 1
        self._lock = threading.Lock()
        self._turn = 0
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        """Failures in a row by URL and table, and until when the process is left alone."""
        self._least: dict[int, dict[int, int]] = {}

    def takes(self, table: TableInfo) -> bool:
        """Whether any process may answer a read of the table."""
        return self.is_used and table.bucket_count <= _BUCKETS_MAX

    def next_url(self, table: str) -> str | None:
        """Return the process for the next read of a table; None: the owner."""
        with self._lock:
            now = time.monotonic()
            for _ in self._urls:
                self._turn = (self._turn + 1) % len(self._urls)
                url = self._urls[self._turn]
                if self._failures.get((url, table), (0, 0.0))[1] <= now:
                    return url
        return None

    def answered(self, url: str, table: str) -> None:
        """Note that a process answers reads of a table."""
        if (url, table) in self._failures:
            with self._lock:
                self._failures.pop((url, table), None)

    def leave_alone(self, url: str, table: str) -> None:
        """Ask a process no more for a while, longer after each failure in a row."""
        with self._lock:
            count = self._failures.get((url, table), (0, 0.0))[0] + 1
            until = time.monotonic() + _LEFT_ALONE.jittered_after(count)
            self._failures[url, table] = (count, until)

    def query(self, table: TableInfo) -> dict[str, str]:
        """Return the parameters with the least that an answer must include."""
        return {
            "at_least": json.dumps(buckets_to_json(self._least.get(table.table_id, {}))),
            "table_id": str(table.table_id),
            "schema_id": str(table.schema_id),
        }

    def note_written(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Remember the ranges of a write as something that later answers must include."""
        if not self.is_used:
            return
        ends = {bucket: end for bucket, (_, end) in ranges.items()}
        table_id = table_of_offsets(ends.values(), what="a write")
        if table_id is not None:
            self._note(table_id, ends)

    def note_fetched(self, bucket: int, end: int) -> None:
        """Remember that the changes of a bucket below `end` were read from the log."""
        if self.is_used and isinstance(end, Offset):
            self._note(end.table_id, {bucket: end})

    def note_answer(self, table: TableInfo, headers: Mapping[bytes, bytes]) -> None:
        """Remember what an answer has included."""
        included = headers.get(INCLUDED_HEADER)
        if included is not None:
            self._note(table.table_id, offsets_from_json(json.loads(included)))

    def forget(self, table: TableInfo) -> None:
        """Forget what was written and read: the service has lost a part, and has said so."""
        with self._lock:
            self._least.pop(table.table_id, None)

    def _note(self, table_id: int, ends: Mapping[int, int]) -> None:
        with self._lock:
            least = self._least.get(table_id, {})
            # Replaced as a whole, because `query` reads without the lock.
            further = {b: int(end) for b, end in ends.items() if end > least.get(b, 0)}
            if further:
                self._least[table_id] = least | further
