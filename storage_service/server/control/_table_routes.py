"""The control routes of tables: create, change, describe and drop; state and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import Body, Query, Request
from fastapi.responses import JSONResponse, Response

from streamhouse.core.errors import InvalidNameError, InvalidRequestError
from streamhouse.core.model.offsets import buckets_to_json
from streamhouse.core.model.table import (
    REJECTED_SUFFIX,
    TableDescriptor,
    TablePath,
)
from streamhouse.core.model.table_state import BucketSizes, TableSizes
from streamhouse.core.model.values.column_clauses import refused_clause
from streamhouse.core.model.values.positions import moment_us
from streamhouse.core.rows.companion import is_rejecting
from streamhouse.storage_service.directory.table_registry import with_properties
from streamhouse.storage_service.engine.added_checks import AddedChecks
from streamhouse.storage_service.engine.upkeep.disk_budget import bytes_below
from streamhouse.storage_service.server._companions import ensure_companion
from streamhouse.storage_service.server.caller import SERVICE, Level
from streamhouse.storage_service.server.control._lake_rows import judge_lake_rows
from streamhouse.storage_service.server.control._request_bodies import (
    AlterPartitioning,
    AlterProperties,
    AlterSchema,
    LakeHistory,
    TableId,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.history.since_time import TimeQuestion, offset_of
from streamhouse.storage_service.server.http._parameters import integer, offsets
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["rejected_routes", "state_routes", "table_routes", "time_routes"]


_COLUMN_FIELDS: Final = ("id", "name", "type", "nullable", "comment")


def table_routes(routes: ControlRoutes, service: Service) -> None:
    manager = service.manager

    @routes.answers("The paths of all tables, or of one database's.")
    async def list_tables(request: Request, database: str | None = None) -> dict[str, list[str]]:
        may = exchange_of(request).caller.may
        if service.shards is None:
            paths = [str(path) for path in manager.list_tables(database)]
        else:
            paths = [str(path) for path in await service.shards.list_tables(database)]
        return {"tables": [path for path in paths if may(Level.READ, path)]}

    @routes.answers("Create a table.", status_code=201)
    async def create_table(
        request: Request, descriptor: Annotated[dict[str, Any], Body()]
    ) -> dict[str, Any]:
        parsed = _checked(descriptor)
        service.access.require(exchange_of(request), Level.ADMIN, str(parsed.path))
        if service.shards is not None and not manager.has_table(parsed.path):
            await service.shards.place(parsed.path)
        table = await manager.create_table(parsed)
        return table.info.to_json()

    @routes.answers("Describe a table.")
    async def describe_table(path: TableName) -> dict[str, Any]:
        return service.readable(path).info.to_json()

    @routes.answers("Drop a table and its log.", status_code=204)
    async def drop_table(
        path: TableName,
        damaged: Annotated[
            bool, Query(description="Drop a table that is damaged; its files stay on disk.")
        ] = False,
    ) -> None:
        if damaged:
            return await manager.drop_damaged(TablePath.parse(path))
        await manager.drop_table(service.table(path).path)

    @routes.answers("Set and remove properties, all or none.")
    async def alter_properties(path: TableName, body: AlterProperties) -> dict[str, Any]:
        table = service.table(path)
        changes: dict[str, Any] = {"updates": body.set, "removals": body.remove}
        changed = with_properties(table.info, **changes)
        added = AddedChecks(table, changed, manager.runtime)
        await judge_lake_rows(service, table, changed, added)
        return (await manager.alter_properties(table.path, **changes, added=added)).to_json()

    @routes.answers("Change the partitioning of the lake's future files.")
    async def alter_partitioning(path: TableName, body: AlterPartitioning) -> dict[str, Any]:
        info = await manager.alter_partitioning(service.table(path).path, body.partitioned_by)
        return info.to_json()

    @routes.answers("Change the schema: all changes or none.")
    async def alter_schema(path: TableName, body: AlterSchema) -> dict[str, Any]:
        return (await manager.alter_schema(service.table(path).path, body.changes)).to_json()


def _checked(descriptor: dict[str, Any]) -> TableDescriptor:
    parsed = TableDescriptor.from_json(descriptor)
    for column in descriptor["schema"]:
        for field in column:
            if field not in _COLUMN_FIELDS:
                raise refused_clause(
                    [field.upper()], where=f"table '{parsed.path}', column '{column['name']}'"
                ) or InvalidRequestError(
                    f"table '{parsed.path}': column '{column['name']}' has no field"
                    f" '{field[:80]}'; the fields are {', '.join(_COLUMN_FIELDS)}"
                )
    if is_rejecting(parsed.path):
        raise InvalidNameError(
            f"table '{parsed.path}': names that end with {REJECTED_SUFFIX} are kept for the"
            " rejected rows of another table; choose another name"
        )
    return parsed


def rejected_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the route `/v1/tables/{path}/rejected`."""

    @routes.answers("Make the table of a table's rejected rows, or find it.")
    async def keep_rejected(path: TableName) -> dict[str, Any]:
        return (await ensure_companion(service, path)).info.to_json()


def state_routes(routes: ControlRoutes, service: Service) -> None:

    @routes.answers("Table, positions and lake snapshot as one consistent cut.")
    async def table_state(
        request: Request,
        path: TableName,
        after: Annotated[
            str | None, Query(description="JSON: wait until some bucket is beyond its offset.")
        ] = None,
        max_wait_ms: Annotated[str, Query(description="How long to wait at most.")] = "0",
        table_id: TableId = None,
    ) -> Response:
        state = await service.table_state(
            exchange_of(request),
            path,
            after=after,
            max_wait_ms=max_wait_ms,
            table_id=table_id,
        )
        return JSONResponse(state.to_json())

    @routes.answers("Check that a lake table has the same history as the log.")
    async def check_lake_history(
        request: Request, path: TableName, body: LakeHistory
    ) -> dict[str, Any]:
        table = service.table(path)
        table.info.check_positions(body.tiered_offsets, table_id=body.table_id)
        # A divergence stops writes and tiering: only reports of tiering callers are stored.
        is_kept = exchange_of(request).caller.may(Level.WRITE, SERVICE)
        await service.manager.tiering.check_lake(table, body.covered(), is_kept=is_kept)
        return {}

    @routes.answers("How many bytes the service keeps of the table.")
    async def table_sizes(path: TableName) -> dict[str, Any]:
        table = service.readable(path)
        log_bytes = [tablet.size_bytes for tablet in table.tablets]
        positions = table.positions()
        key_bytes = [0] * len(log_bytes)
        if table.key_folders:
            key_bytes = await service.run_blocking(bytes_below, table.key_folders)
        sizes = {
            bucket: BucketSizes.of_log(
                log_bytes[bucket],
                start=position.log_start_offset,
                tiered=position.tiered_offset,
                end=position.high_watermark,
                key_bytes=key_bytes[bucket],
            )
            for bucket, position in positions.items()
        }
        return TableSizes(sizes).to_json()


def time_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the route `/v1/tables/{path}/offsets`."""

    @routes.answers("Per bucket, the first offset written at or after a time, in log or lake.")
    async def offsets_for_timestamp(
        path: TableName,
        timestamp_us: Annotated[str, Query(description="Microseconds since the epoch, UTC.")],
        start: Annotated[
            str | None, Query(description="JSON: bucket to first offset of the search.")
        ] = None,
        lost: Annotated[
            str, Query(description="On rows in neither log nor lake: refuse, or skip the rows.")
        ] = "refuse",
        table_id: TableId = None,
    ) -> dict[str, Any]:
        time_us = moment_us(
            integer("timestamp_us", timestamp_us, least=0), name="parameter timestamp_us"
        )
        if lost not in ("refuse", "skip"):
            raise InvalidRequestError(f"parameter lost = '{lost[:40]}' is not one of refuse, skip")
        table = service.readable(path)
        starts: Mapping[int, int] = dict.fromkeys(range(table.info.bucket_count), 0)
        table.info.check_positions({}, table_id=table_id)
        if start is not None:
            starts = offsets("start", start, table.info, table_id=table_id)
        questions = [TimeQuestion(table, b, time_us, offset) for b, offset in starts.items()]
        first_offsets = await _offsets_since(service, questions, skip_lost=lost == "skip")
        return {"table_id": table.info.table_id, "offsets": buckets_to_json(first_offsets)}


async def _offsets_since(
    service: Service, questions: Sequence[TimeQuestion], *, skip_lost: bool
) -> dict[int, int]:
    answers = await service.first_since(questions)
    return {
        question.bucket: offset_of(question, answer, skip_lost=skip_lost)
        for question, answer in zip(questions, answers, strict=True)
    }
