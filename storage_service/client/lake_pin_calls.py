"""What a reader of the lake asks of the service: keep this snapshot while I read it."""

from __future__ import annotations

from urllib.parse import quote

from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.model.table import TablePath

__all__ = ["LakePinCalls"]


class LakePinCalls:
    """The lake pin calls of the client."""

    _transport: HttpTransport

    def pin_snapshot(self, path: str, snapshot_id: int, *, holder: str, ttl_s: float) -> None:
        """Keep a lake snapshot from being expired for `ttl_s` seconds, a week at most.

        A holder has one pin a table: calling again moves it or makes it last. Maintenance may have
        expired the snapshot just before: open it after this call, not before.

        Args:
            holder: 1 to 200 letters, digits and `._:@-`, chosen so that nobody else has it.

        Raises:
            OverloadedError: the table has as many pins as it may have.
        """
        self._transport.request_json(
            "PUT",
            _pin_path(path, holder),
            body={"snapshot_id": str(snapshot_id), "ttl_ms": max(1, round(ttl_s * 1000))},
            is_repeatable=True,
        )

    def unpin_snapshot(self, path: str, *, holder: str) -> None:
        """End the holder's pin; having none is fine."""
        self._transport.request_json("DELETE", _pin_path(path, holder), is_repeatable=True)

    def pinned_snapshots(self, path: str) -> dict[str, int]:
        """Return holder -> id of the lake snapshot it has pinned."""
        answer = self._transport.request_json("GET", _pins_path(path))
        return {pin["holder"]: int(pin["snapshot_id"]) for pin in answer["pins"]}


def _pins_path(path: str) -> str:
    return f"/v1/tables/{TablePath.parse(path)}/lake/pins"


def _pin_path(path: str, holder: str) -> str:
    return f"{_pins_path(path)}/{quote(holder, safe='')}"
