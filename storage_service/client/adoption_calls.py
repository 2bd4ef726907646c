"""What makes a lake table the history of a new table, without copying a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.errors import TableNotFoundError
from streamhouse.storage_service.model.lake_divergence import LakeDivergence
from streamhouse.storage_service.model.table import TableInfo, TablePath

__all__ = ["AdoptionCalls"]

# Rows by key are made from the lake before the answer.
_WAIT_S_MAX: Final = 6 * 3600.0


class AdoptionCalls:
    """The adoption call of the client."""

    _transport: HttpTransport

    def lake_divergence(self, path: str) -> LakeDivergence | None:
        """Return what adopting the lake in place of a table's log would keep, and what not.

        None if there is no such table. Raises `TableExistsError` if the lake has its history.
        """
        try:
            answer = self._adopt(path, {"dry_run": True, "replace": True})
        except TableNotFoundError:
            return None
        return LakeDivergence.from_json(answer)

    def adopt_table(self, path: str, *, force: bool = False, replace: bool = False) -> TableInfo:
        """Make the lake table at `path`, which a Streamhouse service tiered to, a table here.

        It has the columns, keys, buckets and properties that the table had, and its rows as far as
        they were tiered; new rows get the offsets after them. Whoever had the table before cannot
        tier it any more. Its database must exist. Calling it again changes nothing.

        Args:
            force: also if another service tiered to it within the last ten minutes.
            replace: in place of a table whose log has other rows than the lake; its files are set
                aside (`lake_divergence` says which rows that concerns).

        Raises:
            UnsupportedError: the lake table is not one that a table can go on from; says why.
            FencedError: another service may still have the table.
            TableExistsError: there is another table of that name.
            TableNotFoundError: the lake catalog has no such table.
        """
        body = {"force": force, "replace": True} if replace else {"force": force}
        return TableInfo.from_json(self._adopt(path, body))

    def _adopt(self, path: str, body: Mapping[str, bool]) -> dict[str, Any]:
        answer: dict[str, Any] = self._transport.request_json(
            "POST", f"/v1/tables/{TablePath.parse(path)}/adopt", body=body, wait_s=_WAIT_S_MAX
        )
        return answer
