"""The table that is looked up, at one instant: read as a whole, or only what came after another.

Both are what a batch read has: the same plans, on the same cut. Which rows a table has is told by
its changes. So of two cuts that differ in nothing but how far the changes have come, the later one
has the rows of the earlier with these changes; of any other two nothing is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.core.model.table_state import TableState

if TYPE_CHECKING:
    from streamhouse.reading.plan.table_read import PinnedTable

__all__ = ["CutOfTable", "PlannedTable"]

_CLAIM: Final = ("tiering_epoch", "tiering_worker")
"""Who is at work on the lake: no rows change by that."""
_PROGRESS: Final = ("log_start_offset", "high_watermark", "tiered_offset")
"""How far a bucket has come; the rest of its positions takes rows away without a change."""


class PlannedTable:
    """The table as a batch read has it."""

    def __init__(self, plan: LookupPlan, client: StorageClient) -> None:
        self._plan: Final = plan
        self._client: Final = client

    def cut(self) -> CutOfTable:
        """Ask the service how the table is now."""
        return CutOfTable(self._plan, self._client, self._client.table_state(self._plan.table))


class CutOfTable(NamedTuple):
    """The table in a state of it."""

    plan: LookupPlan
    client: StorageClient
    state: TableState

    @property
    def name(self) -> str | None:
        """What no other cut has, nor any other table; None if that cannot be told."""
        # Where acknowledged rows may be lost, others can have their offsets.
        if self.state.may_lose_rows:
            return None
        state = self.state.to_json()
        state["lake"] = _without(state["lake"], _CLAIM)
        return json.dumps([self.plan.endpoint, state], sort_keys=True)

    @property
    def changes(self) -> int:
        """How many changes a read goes through beside the lake."""
        return sum(
            at.high_watermark - max(at.tiered_offset, at.first_offset)
            for at in self.state.positions.values()
        )

    @property
    def place(self) -> Any:
        """Where the cut is among the others, as JSON, for `since`."""
        state = self.state.to_json()
        positions = state.pop("positions")
        state["lake"] = _without(state["lake"], _CLAIM)
        state["cuts"] = {bucket: _without(at, _PROGRESS) for bucket, at in positions.items()}
        ends = {bucket: at["high_watermark"] for bucket, at in positions.items()}
        said = json.dumps(state, sort_keys=True).encode()
        return {"state": hashlib.sha256(said).hexdigest(), "ends": ends}

    def since(self, place: Any) -> int | None:
        """Return how many changes came after the cut that was there, none if it is a later one.

        None if more than changes tells the two apart, or if the log does not have them any more.
        """
        ours = self.place
        if (
            place["state"] != ours["state"]
            or self.state.may_lose_rows
            # Rows that are too old go without being told here.
            or self.state.table.properties().datalake_ttl_ms is not None
        ):
            return None
        ends = _ends_of(place)
        positions = self.state.positions
        behind = [at.high_watermark - ends[bucket] for bucket, at in positions.items()]
        if all(count <= 0 for count in behind):
            return 0
        if any(count < 0 for count in behind) or any(
            ends[bucket] < at.log_start_offset for bucket, at in positions.items()
        ):
            return None
        return sum(behind)

    def read(self, columns: list[str]) -> pa.Table:
        """Return some columns of all rows."""
        return self._pinned(columns).rows()

    def read_since(self, place: Any, columns: list[str]) -> pa.Table:
        """Return what `PinnedTable.changes_since` does, after the cut that was there."""
        return self._pinned(columns).changes_since(_ends_of(place))

    def _pinned(self, columns: list[str]) -> PinnedTable:
        # Most tasks never need what plans reads.
        from streamhouse.reading.options.options import BATCH, read_options
        from streamhouse.reading.options.quoted_names import quoted_list
        from streamhouse.reading.plan.table_read import PinnedTable

        given = {
            "table": self.plan.table,
            "endpoint": self.plan.endpoint,
            "columns": quoted_list(columns),
        }
        return PinnedTable(self.client, read_options(given, use=BATCH), self.state)


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _ends_of(place: Any) -> dict[int, int]:
    return {int(bucket): int(end) for bucket, end in place["ends"].items()}
