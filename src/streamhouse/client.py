"""The client applications use: the storage service's, plus reading both tiers without Spark."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from streamhouse.storage_service.client import StorageClient

__all__ = ["StreamhouseClient"]


class StreamhouseClient(StorageClient):
    """A connection to a Streamhouse service; see `StorageClient` for all but `read`."""

    def read(
        self,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        **options: object,
    ) -> pa.Table:
        """Return a table's rows, lake and log together, as of one instant.

        Rows come in no particular order. Everything is read into memory.

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            columns: only these columns, in this order.
            where: only rows for which this SQL predicate is true.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        # Applications that only write never load what reading the lake needs.
        from streamhouse.connector.options.options import BATCH, as_options, read_options
        from streamhouse.connector.plan.union_read import read_table

        given = as_options(options) | {"table": path, "endpoint": self.endpoint}
        if columns is not None:
            given["columns"] = ",".join(f"`{name}`" for name in columns)
        if where is not None:
            given["where"] = where
        return read_table(self, read_options(given, use=BATCH))
