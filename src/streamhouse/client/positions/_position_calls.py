"""The client's calls about positions of tables and of their readers.

Returned offsets carry their table's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from streamhouse.client._cached_tables import CachedTables
from streamhouse.client.reads import named_table, offsets_to_text
from streamhouse.core.model.offsets import (
    BucketPositions,
    buckets_to_json,
    offsets_from_json,
    offsets_in,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TableState
from streamhouse.core.model.values.positions import moment_us

__all__ = ["PositionCalls"]


class PositionCalls(CachedTables):
    """The calls of `StorageClient` which return or report positions."""

    def positions(self, path: str) -> dict[int, BucketPositions]:
        """Return the position of every bucket, as a consistent cut.

        The offsets carry their table's id: a call with an offset of a dropped table is refused.
        """
        return dict(self.table_state(path).positions)

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        """Return the table, the positions and the lake snapshot as a consistent cut.

        With `after` (bucket -> offset) the call waits up to `max_wait_ms` until the high watermark
        of any bucket is above its offset.
        """
        query: dict[str, str] = {}
        if after is not None:
            query = named_table(self._table_of(path, after.values(), argument="table_state: after"))
            query["after"] = offsets_to_text(after)
            query["max_wait_ms"] = str(max_wait_ms)
        answer = self._transport.request_json(
            "GET",
            f"/v1/tables/{TablePath.parse(path)}/state",
            query=query,
            wait_s=max_wait_ms / 1000,
        )
        state = TableState.from_json(answer)
        self._remember(state.table)
        # Whoever acts by these positions must not find rows that are older.
        self._transport.any_process.note_shown(
            state.table.table_id, {b: at.high_watermark for b, at in state.positions.items()}
        )
        return state

    def _see_all_writes(self, path: str) -> None:
        """Let later lookups of this client include every write acknowledged before this call."""
        # The owner's lookups do anyway.
        if self._transport.any_process.is_used:
            self.table_state(path)

    def offsets_for_timestamp(
        self,
        path: str,
        timestamp_us: int | datetime,
        *,
        start: Mapping[int, int] | None = None,
        skip_lost: bool = False,
        table_id: int | None = None,
    ) -> dict[int, int]:
        """Return per bucket the first offset written at or after a time.

        Rows removed from the log count while the lake has these rows. The offset of a bucket
        without any is the high watermark.

        Args:
            timestamp_us: microseconds since 1970, or a datetime with a zone; 0 is before all rows.
            start: only the buckets here, and only rows from the offset on.
            skip_lost: where rows of the time may be in neither log nor lake, return the first
                existing offset.
            table_id: the table of `start` and of the answer.

        Raises:
            OffsetOutOfRangeError: rows of the time may be missing, and `skip_lost` is not set.
        """
        query = {"timestamp_us": str(moment_us(timestamp_us, name="timestamp_us"))}
        if start is not None:
            query["start"] = offsets_to_text(start)
            argument = "offsets_for_timestamp: start"
            table_id = table_id or self._table_of(path, start.values(), argument=argument)
        if skip_lost:
            query["lost"] = "skip"
        answer = self._transport.request_json(
            "GET",
            f"/v1/tables/{TablePath.parse(path)}/offsets",
            query={**query, **named_table(table_id)},
        )
        return offsets_in(answer.get("table_id"), offsets_from_json(answer["offsets"]))

    def consumers(self, path: str) -> list[dict[str, Any]]:
        """Return the positions of a table's readers, as docs/http_api.md describes them."""
        return list(self._consumers(path)["consumers"])

    def _consumers(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._transport.request_json("GET", _consumers_path(path))
        return answer

    def report_position(
        self,
        path: str,
        consumer: str,
        offsets: Mapping[int, int],
        *,
        reads_lake: bool = False,
        is_durable: bool = False,
    ) -> dict[str, int | None]:
        """Report that `consumer` has read every row below bucket -> offset.

        Returns `lag_rows` and `lag_ms`: the number of unread rows, and the age of the oldest. With
        `reads_lake` the consumer also reads rows that only the lake has. With `is_durable` the
        report is on the service's disk on return; otherwise some seconds later.
        """
        body: dict[str, Any] = {
            "table_id": self._table_of(path, offsets.values(), argument="report_position: offsets"),
            "offsets": buckets_to_json(offsets),
            "reads_lake": reads_lake,
        }
        if is_durable:
            body["durable"] = True
        answer: dict[str, int | None] = self._transport.request_json(
            "PUT",
            _consumers_path(path, consumer),
            body=body,
            is_repeatable=True,
        )
        return answer

    def committed(self, path: str, consumer: str) -> dict[int, int] | None:
        """Return bucket -> offset below which `consumer`, of the caller's token, has read
        everything.

        None for an unknown consumer, or without a report for the table's `table.log.consumers.ttl`.
        """
        answer = self._consumers(path)
        for reader in answer["consumers"]:
            if reader["name"] == consumer and reader["is_own"]:
                return offsets_in(answer.get("table_id"), offsets_from_json(reader["offsets"]))
        return None

    def forget_consumer(self, path: str, consumer: str) -> None:
        """Let nothing wait for a consumer that will not come back; an unknown consumer is no error.

        A forgotten consumer is known again after its next report.
        """
        self._transport.request_json("DELETE", _consumers_path(path, consumer), is_repeatable=True)


def _consumers_path(path: str, consumer: str | None = None) -> str:
    url = f"/v1/tables/{TablePath.parse(path)}/consumers"
    return url if consumer is None else f"{url}/{quote(consumer, safe='')}"
