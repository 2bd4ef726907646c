"""What the client asks about positions: where tables stand, and where their readers do.

Offsets that it returns know their table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from streamhouse.client._known_tables import CachedTables
from streamhouse.client.reads import named_table, offsets_to_text
from streamhouse.core.model.offsets import (
    BucketPositions,
    buckets_to_json,
    offsets_from_json,
    offsets_in,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TableState

__all__ = ["PositionCalls"]


class PositionCalls(CachedTables):
    """The calls of `StorageClient` that return positions, or take them and no rows."""

    def positions(self, path: str) -> dict[int, BucketPositions]:
        """Return where every bucket stands, as one consistent cut.

        The offsets know their table: whoever is given one of a table that was dropped refuses it.
        """
        return dict(self.table_state(path).positions)

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        """Return the table, its positions and its lake snapshot as one consistent cut.

        With `after` (bucket -> offset) it waits up to `max_wait_ms` until some bucket's high
        watermark is beyond it.
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
        return state

    def offsets_for_timestamp(
        self,
        path: str,
        timestamp_us: int,
        *,
        start: Mapping[int, int] | None = None,
        skip_lost: bool = False,
        table_id: int | None = None,
    ) -> dict[int, int]:
        """Return per bucket the first offset written at or after `timestamp_us`.

        Rows that have left the log count as long as the lake has them. A bucket without such a row
        has its high watermark.

        Args:
            start: only these buckets, and only rows from these offsets on.
            skip_lost: where rows that may be of that time are in neither log nor lake, return the
                first offset there is.
            table_id: the table that `start` is of, and the answer.

        Raises:
            OffsetOutOfRangeError: such rows may be missing, and `skip_lost` is not given.
        """
        query = {"timestamp_us": str(timestamp_us)}
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
        """Return where the readers of a table stand, as docs/http_api.md describes it."""
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
        """Say that `consumer` has read every row below bucket -> offset.

        Returns `lag_rows` and `lag_ms`: how many rows it has not read, and the age of the oldest.
        With `reads_lake` it finds rows that have left the log in the lake. With `is_durable` it is
        on the service's disk on return, and not some seconds later.
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
        """Return bucket -> offset below which `consumer`, of the caller's token, has read all.

        None if the service knows of no such consumer, or has heard nothing of it for the table's
        `table.log.consumers.ttl`.
        """
        answer = self._consumers(path)
        for one in answer["consumers"]:
            if one["name"] == consumer and one["is_own"]:
                return offsets_in(answer.get("table_id"), offsets_from_json(one["offsets"]))
        return None

    def forget_consumer(self, path: str, consumer: str) -> None:
        """Let nothing wait for a consumer that will not come back; none of it being there is fine.

        One that does is known again with its next report.
        """
        self._transport.request_json("DELETE", _consumers_path(path, consumer), is_repeatable=True)


def _consumers_path(path: str, consumer: str | None = None) -> str:
    of_table = f"/v1/tables/{TablePath.parse(path)}/consumers"
    return of_table if consumer is None else f"{of_table}/{quote(consumer, safe='')}"
