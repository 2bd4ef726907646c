"""The calls of a client that begin transactions, and tell what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamhouse.client._tables import TableCalls
from streamhouse.client.values.arguments import choice, names, seconds, whole
from streamhouse.client.writing.transactions import Transaction
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.transaction import TransactionOperation

__all__ = ["TransactionCalls"]


class TransactionCalls(TableCalls):
    """The calls of `StorageClient` that are about transactions, and those about tables."""

    def begin_transaction(
        self,
        path: str,
        *,
        operation: str = "append",
        columns: Sequence[str] | None = None,
        app_id: str | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
        join: bool = False,
        schema_id: int | None = None,
        source: str | None = None,
        run: str | None = None,
    ) -> Transaction:
        """Begin a transaction: stage rows, then commit them at one instant, or abort.

        Args:
            operation: `append` (log tables), `upsert` or `delete` (primary key tables), or
                `overwrite`, which leaves a table with what its rows make of an empty one. Rows to
                upsert may have a column `__change_type`, as for `upsert`.
            columns: upsert only these columns, as for `upsert`.
            app_id: with `version`, makes the transaction happen once: a version that is not above
                the last one that `app_id` committed to this table is skipped (`is_skipped`).
            timeout_s: drop the transaction when nobody has staged for so long; default: the
                service's, an hour.
            join: return the open transaction that does the same for this version of `app_id`, if
                there is one: so many processes share one that none of them began before the others.
            schema_id: the version of the table's schema that columns are named by, here and in the
                rows; default: that of `Transaction.table`.
            source: who numbers the versions, as a stream's checkpoint does. A version that another
                source has committed is refused, not skipped: its rows are other ones.
            run: in which life of `source`. One that commits a version twice is refused, too.
        """
        chosen = None if columns is None else names(columns, what="columns")
        table: TableInfo | None = None
        if chosen is not None or schema_id is not None:
            # The columns named here, and those of the rows, are of one version.
            table = self._with_table(path, lambda known: known.naming(chosen or (), schema_id))
        answer = self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/transactions",
            body={
                "operation": choice(operation, TransactionOperation, what="operation"),
                "columns": chosen,
                "schema_id": None if table is None else table.stated_version,
                "app_id": app_id,
                "version": None if version is None else whole(version, what="version"),
                "timeout_ms": None
                if timeout_s is None
                else max(1, round(seconds(timeout_s, what="timeout_s") * 1000)),
                "join": join,
                # An older service knows neither.
                **({} if source is None else {"source": source}),
                **({} if run is None else {"run": run}),
            },
            # One that was begun for nothing times out.
            is_repeatable=True,
        )
        known = table or self._known(path)
        transaction_id = str(answer["transaction_id"])
        transaction = self.open_transaction(path, transaction_id, schema_id=schema_id)
        transaction.last_version = answer.get("last_version")
        is_current = known is not None and known.schema_id == answer["schema_id"]
        if known is not None and known.table_id == answer["table_id"] and (is_current or table):
            transaction.table = known
        return transaction

    def transactions(self, path: str, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return what became of the latest transactions, newest first, as docs/http_api.md says."""
        answer: dict[str, Any] = self._transport.request_json(
            "GET",
            f"/v1/tables/{TablePath.parse(path)}/transactions",
            query={"limit": str(limit)},
        )
        return list(answer["transactions"])

    def open_transaction(
        self, path: str, transaction_id: str, *, schema_id: int | None = None
    ) -> Transaction:
        """Return a transaction that was begun elsewhere; the id of a skipped one is empty.

        The columns of its rows are named by version `schema_id` of the table's schema, by default
        the one there is at the first rows. Nothing is asked of the service before it is used.
        """
        return Transaction(
            self._transport,
            TablePath.parse(path),
            transaction_id=transaction_id,
            table=lambda: self.describe_table(path).in_version(schema_id),
        )
