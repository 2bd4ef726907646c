"""StorageClient: an application's client, and what only this package asks of the service.

Tiering workers, the connector and the command line ask it: their calls may change with any release,
and an application's `StreamhouseClient` has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamhouse.client import reads
from streamhouse.client._application_client import ApplicationClient
from streamhouse.client._tiering import TieringCalls
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.core.model.table import TablePath

__all__ = ["StorageClient"]


class StorageClient(ApplicationClient, TieringCalls):
    """See `ApplicationClient` for how it is made and used."""

    @classmethod
    def of(cls, client: ApplicationClient) -> StorageClient:
        """Return the same client as this package sees it: its connections, and what it knows."""
        if isinstance(client, StorageClient):
            return client
        same = cls.__new__(cls)
        same.__dict__ = vars(client)
        return same

    @property
    def transport(self) -> HttpTransport:
        """What sends the requests."""
        return self._transport

    def begin_reading(self, path: str, offsets: Mapping[int, int]) -> None:
        """Say that who reads from bucket -> offset begins there, and goes on from no rows before.

        Otherwise a log that has lost rows this client has read there is refused (`LogCutError`).
        """
        self._reached.forget(str(TablePath.parse(path)), offsets)

    def fingerprint_at(
        self,
        path: str,
        bucket: int,
        offset: int,
        *,
        table_id: int,
        expected: str | None = None,
    ) -> str | None:
        """Return what the log of a table has below an offset, where its rows may be lost.

        That is a fingerprint. None where they are not, or it is not known. Raises `LogCutError` if
        it is not `expected`.
        """
        name = str(TablePath.parse(path))
        return reads.fingerprint_at(
            self._transport, name, bucket, offset, table_id=table_id, expected=expected
        )

    def position_reports(
        self, path: str, consumer: str, *, reads_lake: bool = False
    ) -> PositionReports:
        """Return what tells the service, beside the reading, how far `consumer` is."""
        return PositionReports.of(self, path, consumer, reads_lake=reads_lake)
