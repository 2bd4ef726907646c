"""The looked-up table at one instant: all rows, or only the rows changed since an earlier cut.

Both use the plans of a batch read on the same cut. A table's changes determine its rows. If two
cuts differ only in the ends of their changes, the later cut has the rows of the earlier cut with
the changes in between applied. No other pair of cuts is compared.
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
    from streamhouse.reading.plan.pinned_table import PinnedTable

__all__ = ["CutOfTable", "PlannedTable"]

_CLAIM: Final = ("tiering_epoch", "tiering_worker")
"""The worker of the lake; a new worker changes no rows."""
_PROGRESS: Final = ("log_start_offset", "high_watermark", "tiered_offset")
"""The progress of a bucket; its other positions may remove rows without a change record."""


class PlannedTable:
    """The table as a batch read plans it."""

    def __init__(self, plan: LookupPlan, client: StorageClient) -> None:
        self._plan: Final = plan
        self._client: Final = client

    def cut(self) -> CutOfTable:
        """Ask the service for the current state of the table."""
        return CutOfTable(self._plan, self._client, self._client.table_state(self._plan.table))


class CutOfTable(NamedTuple):
    """The table in one state."""

    plan: LookupPlan
    client: StorageClient
    state: TableState

    @property
    def name(self) -> str | None:
        """A unique name among the cuts of all tables; None if the name would not be unique."""
        # If acknowledged rows may be lost, their offsets can be reused by different rows.
        if self.state.may_lose_rows:
            return None
        state = self.state.to_json()
        state["lake"] = _without(state["lake"], _CLAIM)
        return json.dumps([self.plan.endpoint, state], sort_keys=True)

    @property
    def changes(self) -> int:
        """The number of changes outside the lake that a read goes through."""
        return sum(
            at.high_watermark - max(at.tiered_offset, at.first_offset)
            for at in self.state.positions.values()
        )

    @property
    def place(self) -> Any:
        """The position of the cut among the cuts of the table, as JSON, for `since`."""
        state = self.state.to_json()
        positions = state.pop("positions")
        state["lake"] = _without(state["lake"], _CLAIM)
        state["cuts"] = {bucket: _without(at, _PROGRESS) for bucket, at in positions.items()}
        ends = {bucket: at["high_watermark"] for bucket, at in positions.items()}
        encoded = json.dumps(state, sort_keys=True).encode()
        return {"state": hashlib.sha256(encoded).hexdigest(), "ends": ends}

    def since(self, place: Any) -> int | None:
        """Return the number of changes after the cut at `place`, 0 for a later cut.

        Return None if the two cuts differ in more than changes, or if the log has dropped the
        changes.
        """
        ours = self.place
        if (
            place["state"] != ours["state"]
            or self.state.may_lose_rows
            # Expired rows disappear without a change record.
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
        """Return `PinnedTable.changes_since` for the cut at `place`."""
        return self._pinned(columns).changes_since(_ends_of(place))

    def _pinned(self, columns: list[str]) -> PinnedTable:
        from streamhouse.reading.options.options import BATCH, read_options  # noqa: PLC0415 - most tasks never plan
        from streamhouse.reading.options.quoted_names import quoted_list  # noqa: PLC0415 - most tasks never plan
        from streamhouse.reading.plan.pinned_table import PinnedTable  # noqa: PLC0415 - most tasks never plan

        options = {
            "table": self.plan.table,
            "endpoint": self.plan.endpoint,
            "columns": quoted_list(columns),
        }
        return PinnedTable(self.client, read_options(options, use=BATCH), self.state)


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _ends_of(place: Any) -> dict[int, int]:
    return {int(bucket): int(end) for bucket, end in place["ends"].items()}
