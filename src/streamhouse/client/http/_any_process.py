"""Reads that any process of a service may answer: which process is next, and what is the least.

With `read_from=any` lookups go to the listed endpoints in turn. Each request names the least that
its answer must include: the client's own writes, what it has read before, and the positions that it
was told, by table and bucket. So a client never reads what is older than its own writes, and never
goes back. Fetches of rows that exist go to the endpoints in turn as well.

A process that does not answer, or not for a table, is left alone for a while: the longer, the
longer the client has waited for nothing. The owner is always the last to be asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
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
from streamhouse.core.model.table import VERSION_HEADER, TableInfo

__all__ = ["AnyProcess"]

_LEFT_ALONE: Final = Backoff(first_s=0.5, most_s=30.0)
# A process that hangs takes at most a tenth of a client's time.
_LEFT_ALONE_A_WAIT: Final = 10
_ALL_TABLES: Final = ""
# The offsets of more buckets would make long requests.
_BUCKETS_MAX: Final = 256


class AnyProcess:
    """The reads of one client. Thread-safe."""

    def __init__(
        self, endpoints: Endpoints, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock: Final = clock
        self._urls: Final = endpoints.urls
        self.is_used: Final = endpoints.read_from == "any" and len(endpoints.urls) > 1
        self._lock = threading.Lock()
        self._turn = 0
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        """Failures in a row by URL and table, and until when the process is left alone."""
        self._least: dict[int, dict[int, int]] = {}
        # By table id: a version of the schema that is newer than a description was.
        self._schema_ids: dict[int, int] = {}

    def takes(self, table: TableInfo) -> bool:
        """Whether any process may answer a read of the table."""
        return self.is_used and table.bucket_count <= _BUCKETS_MAX

    def next_url(self, table: str) -> str | None:
        """Return the process for the next read of a table; None: the owner."""
        with self._lock:
            now = self._clock()
            for _ in self._urls:
                self._turn = (self._turn + 1) % len(self._urls)
                url = self._urls[self._turn]
                if all(self._failure(url, name)[1] <= now for name in (table, _ALL_TABLES)):
                    return url
        return None

    def _failure(self, url: str, table: str) -> tuple[int, float]:
        return self._failures.get((url, table), (0, 0.0))

    def answered(self, url: str, table: str) -> None:
        """Note that a process answers reads of a table."""
        if self._failures:
            with self._lock:
                for name in (table, _ALL_TABLES):
                    self._failures.pop((url, name), None)

    def leave_alone(self, url: str, table: str = _ALL_TABLES, *, waited_s: float = 0.0) -> None:
        """Ask a process no more for a while, longer after each failure in a row.

        Without `table` for no table: the process does not answer at all.
        """
        with self._lock:
            count = self._failure(url, table)[0] + 1
            pause_s = max(_LEFT_ALONE.jittered_after(count), _LEFT_ALONE_A_WAIT * waited_s)
            self._failures[url, table] = (count, self._clock() + pause_s)

    def query(self, table: TableInfo) -> dict[str, str]:
        """Return the parameters with the least that an answer must include."""
        schema_id = max(table.schema_id, self._schema_ids.get(table.table_id, 0))
        return {
            "at_least": json.dumps(buckets_to_json(self._least.get(table.table_id, {}))),
            "table_id": str(table.table_id),
            "schema_id": str(schema_id),
        }

    def note_written(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Remember the ranges of a write as something that later answers must include."""
        if not self.is_used:
            return
        ends = {bucket: end for bucket, (_, end) in ranges.items()}
        table_id = table_of_offsets(ends.values(), what="a write")
        if table_id is not None:
            self._note(table_id, ends)

    def note_shown(self, table_id: int, ends: Mapping[int, int]) -> None:
        """Remember the ends of a table's buckets that the owner has shown."""
        if self.is_used:
            self._note(table_id, ends)

    def note_fetched(self, bucket: int, end: int) -> None:
        """Remember that the changes of a bucket below `end` were read from the log."""
        if self.is_used and isinstance(end, Offset):
            self._note(end.table_id, {bucket: end})

    def note_answer(self, table: TableInfo, headers: Mapping[bytes, bytes]) -> None:
        """Remember what an answer has included, and the version of its columns."""
        table_id, _, schema_id = headers.get(VERSION_HEADER, b"").partition(b".")
        if schema_id and int(table_id) == table.table_id and int(schema_id) > table.schema_id:
            with self._lock:
                newest = self._schema_ids.get(table.table_id, 0)
                self._schema_ids[table.table_id] = max(newest, int(schema_id))
        included = headers.get(INCLUDED_HEADER)
        if included is not None:
            self._note(table.table_id, offsets_from_json(json.loads(included)))

    def forget_schema(self, table: TableInfo) -> None:
        """Forget the version of the schema that was read: the owner may have lost the change."""
        with self._lock:
            self._schema_ids.pop(table.table_id, None)

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
