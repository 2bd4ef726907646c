"""What the client asks about bytes."""

from __future__ import annotations

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.model.table_sizes import TableSizes

__all__ = ["SizeCalls"]


class SizeCalls:
    """The calls of the client about bytes."""

    _transport: HttpTransport

    def table_sizes(self, path: str) -> TableSizes:
        """Return how many bytes the service keeps of a table; the lake's are in its snapshots."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}/sizes")
        return TableSizes.from_json(answer)
