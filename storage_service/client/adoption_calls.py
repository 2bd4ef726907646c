"""What makes a lake table the history of a new table, without copying a row."""

from __future__ import annotations

from typing import Final

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.model.table import TableInfo, TablePath

__all__ = ["AdoptionCalls"]

# Rows by key are made from the lake before the answer.
_WAIT_S_MAX: Final = 6 * 3600.0


class AdoptionCalls:
    """The adoption call of the client."""

    _transport: HttpTransport

    def adopt_table(self, path: str, *, force: bool = False) -> TableInfo:
        """Make the lake table at `path`, which a Streamhouse service tiered to, a table here.

        It has the columns, keys, buckets and properties that the table had, and its rows as far as
        they were tiered; new rows get the offsets after them. Whoever had the table before cannot
        tier it any more. Its database must exist. Calling it again changes nothing.

        Args:
            force: also if another service tiered to it within the last ten minutes.

        Raises:
            UnsupportedError: the lake table is not one that a table can go on from; says why.
            FencedError: another service may still have the table.
            TableExistsError: there is another table of that name.
            TableNotFoundError: the lake catalog has no such table.
        """
        answer = self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/adopt",
            body={"force": force},
            wait_s=_WAIT_S_MAX,
        )
        return TableInfo.from_json(answer)
