"""StorageClient: an application's client with the calls that only this package makes.

Tiering workers, the connector and the command line use these calls, which may change with any
release. An application's `StreamhouseClient` does not have them.
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
    """See `StreamhouseClient` for arguments and use."""

    @classmethod
    def of(cls, client: ApplicationClient) -> StorageClient:
        """Return the same client with this class: it shares connections and caches."""
        if isinstance(client, StorageClient):
            return client
        same = cls.__new__(cls)
        same.__dict__ = vars(client)
        return same

    @property
    def transport(self) -> HttpTransport:
        """The transport of the requests."""
        return self._transport

    def begin_reading(self, path: str, offsets: Mapping[int, int]) -> None:
        """Start a new reader at bucket -> offset: rows read earlier by this client do not count.

        Without this call `LogCutError` refuses a log that has lost rows which this client has read.
        """
        self._reached.forget(str(TablePath.parse(path)), offsets)

    def see_all_writes(self, path: str) -> None:
        """Let later lookups of this client include every write acknowledged before this call."""
        self._see_all_writes(path)

    def fingerprint_at(
        self,
        path: str,
        bucket: int,
        offset: int,
        *,
        table_id: int,
        expected: str | None = None,
    ) -> str | None:
        """Return a fingerprint of the log below an offset, if rows below it may be lost.

        None if no rows can be lost, or without a fingerprint. Raises `LogCutError` if the
        fingerprint is not `expected`.
        """
        name = str(TablePath.parse(path))
        return reads.fingerprint_at(
            self._transport, name, bucket, offset, table_id=table_id, expected=expected
        )

    def position_reports(
        self, path: str, consumer: str, *, reads_lake: bool = False
    ) -> PositionReports:
        """Return the reports that tell the service the position of `consumer`."""
        return PositionReports.of(self, path, consumer, reads_lake=reads_lake)
