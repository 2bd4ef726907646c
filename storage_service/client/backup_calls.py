"""Backups of a running service: `streamhouse backup` is made of these."""

from __future__ import annotations

from typing import Any

from streamhouse.storage_service.client.transport import HttpTransport

__all__ = ["BackupCalls"]

_ROUTE = "/v1/admin/backup"


class BackupCalls:
    """The backup calls of the client."""

    _transport: HttpTransport

    def stage_backup(self, *, with_lake: bool = False, timeout_s: float = 600.0) -> dict[str, Any]:
        """Stage a backup below the service's data directory; return where, and what is in it.

        Appends go on meanwhile; creating and dropping tables waits. Take the files away, then call
        `discard_backup`.

        Raises:
            AlreadyExistsError: another backup is staged.
        """
        answer: dict[str, Any] = self._transport.request_json(
            "POST", _ROUTE, body={"with_lake": with_lake}, wait_s=timeout_s
        )
        return answer

    def discard_backup(self) -> None:
        """Remove what is staged; nothing being staged is fine."""
        self._transport.request_json("DELETE", _ROUTE, is_repeatable=True)
