"""The control routes of transactions; `data/_stage_route.py` stages the rows."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse, Response

from streamhouse.core.errors import StreamhouseError, UnsupportedError
from streamhouse.core.model.casts.written_rows import current_columns
from streamhouse.core.model.merge_engine import DeleteBehavior
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.transaction import (
    LinkedCommit,
    ReadPosition,
    TransactionOperation,
)
from streamhouse.core.rows.companion import rejected_path
from streamhouse.storage_service.server.control._request_bodies import (
    BeginTransaction,
    CommitTransaction,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.http._parameters import integer, written_version
from streamhouse.storage_service.server.service import Service

__all__ = ["transaction_routes"]


def transaction_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes below `/v1/tables/{path}/transactions`."""
    coordinator = service.manager.transactions

    @routes.answers("The latest transactions of a table, with their outcomes.")
    async def list_transactions(
        path: TableName,
        limit: Annotated[str, Query(description="The most to list, from the newest on.")] = "1000",
    ) -> dict[str, list[Any]]:
        transactions = coordinator.of(service.table(path))
        return {"transactions": transactions.latest(integer("limit", limit, least=1))}

    @routes.answers("Begin a transaction.", status_code=201)
    async def begin_transaction(path: TableName, body: BeginTransaction) -> dict[str, Any]:
        table = service.table(path)
        transaction_id, status = await coordinator.of(table).begin(
            body.operation,
            columns=_columns(body, table.info),
            app_id=body.app_id,
            version=body.version,
            timeout_ms=body.timeout_ms,
            join=body.join,
            source=body.source,
            run=body.run,
        )
        return {
            "transaction_id": transaction_id,
            "status": str(status),
            "table_id": table.info.table_id,
            "schema_id": table.info.schema_id,
            "last_version": coordinator.of(table).latest_version(body.app_id),
        }

    @routes.answers("The status of a transaction.")
    async def transaction_status(path: TableName, transaction_id: str) -> dict[str, Any]:
        return coordinator.of(service.table(path)).status(transaction_id)

    @routes.answers("Commit staged parts, all or none.")
    async def commit_transaction(
        path: TableName,
        transaction_id: str,
        body: CommitTransaction,
        max_wait_ms: Annotated[
            str, Query(description="Then the answer is 202 with the status; the commit goes on.")
        ] = "60000",
    ) -> Response:
        table = service.table(path)
        wait_ms = integer("max_wait_ms", max_wait_ms, least=0)
        wait_s = min(wait_ms, service.config.fetch_wait_ms_max) / 1000
        transactions = coordinator.of(table)
        try:
            result = await transactions.commit(
                transaction_id,
                body.parts,
                wait_s=wait_s,
                read=_read_position(body, table.info),
                linked=_linked(body, table.path),
            )
        except StreamhouseError:
            service.manager.check_open(table)
            raise
        if result is None:
            return JSONResponse(transactions.status(transaction_id), status_code=202)
        return JSONResponse({"table_id": table.info.table_id, **result.to_json()})

    @routes.answers("Drop a transaction, unless it is decided.")
    async def abort_transaction(path: TableName, transaction_id: str) -> dict[str, str]:
        return {"status": str(coordinator.of(service.table(path)).abort(transaction_id))}


def _read_position(body: CommitTransaction, table: TableInfo) -> ReadPosition | None:
    if body.read_offsets is None:
        return None
    if body.table_id is None:
        table.check_positions(body.read_offsets, table_id=None)
    # A different table id is a conflict, which ends the transaction as any other conflict.
    return ReadPosition(offsets=body.read_offsets, table_id=body.table_id, isolation=body.isolation)


def _linked(body: CommitTransaction, path: TablePath) -> LinkedCommit | None:
    """Return the parts of the table of rejected rows; the body cannot name another table."""
    if body.rejected is None:
        return None
    return LinkedCommit(
        table=str(rejected_path(path)),
        transaction_id=body.rejected.transaction_id,
        parts=tuple(body.rejected.parts),
        broken=body.rejected.broken,
    )


def _columns(body: BeginTransaction, table: TableInfo) -> tuple[str, ...] | None:
    """Check that the table supports the operation; return the columns of a partial update."""
    is_append = body.operation is TransactionOperation.APPEND
    is_overwrite = body.operation is TransactionOperation.OVERWRITE
    if table.is_primary_key_table and is_append:
        raise UnsupportedError(
            f"table '{table.path}' has a primary key: begin a transaction that upserts or deletes"
        )
    if is_overwrite and table.is_primary_key_table:
        _check_overwritten(table)
    if not table.is_primary_key_table and not (is_append or is_overwrite):
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so there is nothing to {body.operation};"
            " begin a transaction that appends or overwrites"
        )
    if body.columns is None:
        return None
    if body.operation is not TransactionOperation.UPSERT:
        raise UnsupportedError(
            f"transaction of '{table.path}': only an upsert names columns to update"
        )
    schema_id = written_version(body.schema_id, table)
    schema = table.schema if schema_id is None else table.schema_version(schema_id)
    columns = schema.select(body.columns, table=str(table.path)).names
    if schema_id is None:
        return tuple(columns)
    return tuple(current_columns(table, columns, schema_id=schema_id))


def _check_overwritten(table: TableInfo) -> None:
    behavior = table.descriptor.merge_rules().delete_behavior
    if behavior is not DeleteBehavior.ALLOW:
        raise UnsupportedError(
            f"table '{table.path}' has table.delete.behavior = {behavior}, so rows of it stay, and"
            " it cannot be overwritten; drop it and create it anew"
        )
