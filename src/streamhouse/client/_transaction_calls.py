"""The client's calls that begin and list transactions."""

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
    """The calls of `StorageClient` for transactions, and for tables."""

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
        """Begin a transaction: stage rows, then commit all rows at one instant, or abort.

        Args:
            operation: `append` (log tables), `upsert` or `delete` (primary key tables), or
                `overwrite`, which replaces all rows by the staged rows. Rows to upsert may have a
                column `__change_type`.
            columns: upsert only these columns, as for `upsert`.
            app_id: with `version`, makes the transaction happen once: a version not above the last
                one that `app_id` committed to this table is skipped (`is_skipped`).
            timeout_s: drop the transaction after this time without staged rows; default: an hour.
            join: return an open transaction for the same operation and version of `app_id`, if any,
                so that many processes share it.
            schema_id: the schema version that names the columns; default: of `Transaction.table`.
            source: the origin of the versions, as a stream's checkpoint. A version committed by
                another source is refused, not skipped: its rows are different.
            run: the life of `source`. Its second commit of a version is refused, too.
        """
        column_names = None if columns is None else names(columns, argument="columns")
        table: TableInfo | None = None
        if column_names is not None or schema_id is not None:
            # The columns named here and the columns of the rows are of one version.
            table = self._with_table(
                path, lambda table_info: table_info.naming(column_names or (), schema_id)
            )
        answer = self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/transactions",
            body={
                "operation": choice(operation, TransactionOperation, argument="operation"),
                "columns": column_names,
                "schema_id": None if table is None else table.stated_version,
                "app_id": app_id,
                "version": None if version is None else whole(version, argument="version"),
                "timeout_ms": _timeout_ms(timeout_s),
                "join": join,
                # An older service knows neither parameter.
                **({} if source is None else {"source": source}),
                **({} if run is None else {"run": run}),
            },
            # A transaction begun twice times out once unused.
            is_repeatable=True,
        )
        table_info = table or self._cached_table(path)
        transaction_id = str(answer["transaction_id"])
        transaction = self.open_transaction(path, transaction_id, schema_id=schema_id)
        transaction.last_version = answer.get("last_version")
        if transaction.is_skipped:
            self._see_all_writes(path)  # the rows were committed by this application
        is_current = table_info is not None and table_info.schema_id == answer["schema_id"]
        if (
            table_info is not None
            and table_info.table_id == answer["table_id"]
            and (is_current or table)
        ):
            transaction.table = table_info
        return transaction

    def transactions(self, path: str, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the outcomes of the latest transactions, newest first; docs/http_api.md has the
        form.
        """
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
        the version at the first rows. No request is sent before the transaction is used.
        """
        return Transaction(
            self._transport,
            TablePath.parse(path),
            transaction_id=transaction_id,
            table=lambda: self.describe_table(path).in_version(schema_id),
            see_all_writes=lambda: self._see_all_writes(path),
        )


def _timeout_ms(timeout_s: float | None) -> int | None:
    if timeout_s is None:
        return None
    return max(1, round(seconds(timeout_s, argument="timeout_s") * 1000))
