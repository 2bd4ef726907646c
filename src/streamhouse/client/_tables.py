"""The client's calls for databases, tables and lake tables: one JSON request a call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

from streamhouse.client.http._stop_signal import pause
from streamhouse.client.positions._position_calls import PositionCalls
from streamhouse.client.positions._tiered_wait import POLL_BACKOFF, TieredWait, rounds_text
from streamhouse.client.values._schema_forms import (
    SchemaForm,
    TypeForm,
    arrow_schema,
    arrow_type,
)
from streamhouse.client.values.arguments import (
    names,
    property_texts,
    seconds,
    whole,
)
from streamhouse.core.errors import (
    DatabaseExistsError,
    DatabaseNotFoundError,
    ForbiddenError,
    TableExistsError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.casts.column_defaults import default_text
from streamhouse.core.model.lake.coverage import LakeDivergence
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema, canonical_type, type_to_json
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.table_state import TableSizes

__all__ = ["TableCalls"]

# The service makes the rows by key from the lake before it answers an adoption.
_ADOPTION_WAIT_S_MAX: Final = 6 * 3600.0
_BACKUP_ROUTE: Final = "/v1/admin/backup"

_T = TypeVar("_T")


class TableCalls(PositionCalls):
    """The calls of `StorageClient` for whole tables, not for their rows."""

    # -- databases and tables ------------------------------------------------------------------

    def list_databases(self) -> list[str]:
        """Return the names of all databases, sorted."""
        return list(self._transport.request_json("GET", "/v1/databases")["databases"])

    def create_database(self, name: str) -> None:
        """Create a database; raises `DatabaseExistsError`."""
        self._transport.request_json("POST", "/v1/databases", body={"name": name})

    def drop_database(self, name: str) -> None:
        """Drop an empty database; raises `DatabaseNotEmptyError`."""
        self._transport.request_json("DELETE", f"/v1/databases/{quote(name, safe='')}")

    def create_table(
        self,
        path: str,
        schema: SchemaForm,
        *,
        primary_key: str | Sequence[str] = (),
        bucket_count: int = 1,
        bucket_key: str | Sequence[str] = (),
        partitioned_by: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
    ) -> TableInfo:
        """Create a table, and the database if needed.

        Args:
            path: `database.table`, or `table` in database `default`.
            schema: columns as an Arrow schema, as Spark's DDL (`"id BIGINT NOT NULL, name STRING"`)
                or as (name, type) pairs with types of Arrow or Spark. Only the common types of
                Spark and Iceberg are allowed; a refusal names the column.
            primary_key: columns by which rows are upserted, never null; empty makes a log table.
            bucket_count: how many buckets, the unit of order and of parallelism; fixed for life.
            bucket_key: rows with equal values here share a bucket; empty spreads rows evenly.
            partitioned_by: lake partitioning, as in `["region", "day(event_time)"]`.
            properties: `table.*` properties.
            if_not_exists: return an existing table with this definition; it may have more
                properties.

        Raises:
            InvalidSchemaError, InvalidNameError, UnknownOptionError: which part of the call was
                refused; no table was made.
            TableExistsError: with `if_not_exists`, an existing table differs; names the
                differences.
        """
        key = names(primary_key, argument="primary_key")
        descriptor = TableDescriptor(
            path=TablePath.parse(path),
            schema=Schema.from_arrow(arrow_schema(schema, not_null=key)),
            primary_key=key,
            bucket_count=whole(bucket_count, argument="bucket_count", least=1),
            bucket_key=names(bucket_key, argument="bucket_key"),
            partitioned_by=tuple(
                PartitionField.parse(text)
                for text in names(partitioned_by, argument="partitioned_by")
            ),
            properties=property_texts(properties or {}, argument="properties"),
        )
        try:
            return self._create(descriptor)
        except TableExistsError as error:
            if not if_not_exists:
                raise TableExistsError(
                    f"{error.message}; with if_not_exists=True it is taken as it is, if it is the"
                    " same",
                    request_id=error.request_id,
                ) from None
            existing = self.describe_table(path)
        if differences := descriptor.differences(existing.descriptor):
            raise TableExistsError(
                f"table '{descriptor.path}' exists with another definition:"
                f" {'; '.join(differences)}; alter it, or create it as it is"
            )
        return existing

    def _create(self, descriptor: TableDescriptor) -> TableInfo:
        try:
            answer = self._post_table(descriptor)
        except DatabaseNotFoundError:
            # Another client may make the database at the same time.
            with contextlib.suppress(DatabaseExistsError):
                self.create_database(descriptor.path.database)
            answer = self._post_table(descriptor)
        return self._remember(TableInfo.from_json(answer))

    def _post_table(self, descriptor: TableDescriptor) -> Any:
        return self._transport.request_json(
            "POST", "/v1/tables", body=descriptor.to_json(), table=str(descriptor.path)
        )

    def keep_rejected(self, path: str) -> TableInfo:
        """Return the table of a table's rejected rows, `path$rejected`, and create it if needed."""
        parsed = TablePath.parse(path)
        answer = self._transport.request_json("POST", f"/v1/tables/{parsed}/rejected")
        return self._remember(TableInfo.from_json(answer))

    def drop_table(self, path: str, *, if_exists: bool = False, damaged: bool = False) -> None:
        """Drop a table and its log. Its lake table stays for other engines.

        With `if_exists` a missing table, or a missing database, is no error. A table that raises
        `TableDamagedError` is dropped only with `damaged`; its files stay on the service's disk.
        """
        parsed = TablePath.parse(path)
        self._forget(parsed)
        try:
            query = {"damaged": "true"} if damaged else None
            self._transport.request_json("DELETE", f"/v1/tables/{parsed}", query=query)
        except (TableNotFoundError, DatabaseNotFoundError) as error:
            if not if_exists:
                raise type(error)(
                    f"{error.message}; with if_exists=True this is no error",
                    request_id=error.request_id,
                ) from None

    def list_tables(self, database: str | None = None) -> list[str]:
        """Return the paths of all tables, or of one database's, sorted."""
        query = None if database is None else {"database": database}
        return list(self._transport.request_json("GET", "/v1/tables", query=query)["tables"])

    def alter_properties(
        self,
        path: str,
        *,
        updates: Mapping[str, str] | None = None,
        removals: Sequence[str] = (),
    ) -> TableInfo:
        """Set and remove table properties in one step."""
        answer = self._transport.request_json(
            "PATCH",
            f"/v1/tables/{TablePath.parse(path)}/properties",
            body={
                "set": property_texts(updates or {}, argument="updates"),
                "remove": list(names(removals, argument="removals")),
            },
        )
        return self._remember(TableInfo.from_json(answer))

    def count(self, path: str) -> int:
        """Return the exact number of the table's rows."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}/count")
        return int(answer["count"])

    def table_sizes(self, path: str) -> TableSizes:
        """Return the bytes of a table in the service; lake snapshots have the lake's bytes."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}/sizes")
        return TableSizes.from_json(answer)

    # -- schemas -------------------------------------------------------------------------------

    def alter_schema(self, path: str, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
        """Apply several changes, all or none; docs/schema_evolution.md has their form."""
        answer = self._transport.request_json(
            "PATCH",
            f"/v1/tables/{TablePath.parse(path)}/schema",
            body={"changes": [dict(change) for change in changes]},
        )
        return self._remember(TableInfo.from_json(answer))

    def add_column(
        self,
        path: str,
        name: str | Sequence[str],
        data_type: TypeForm,
        *,
        comment: str = "",
        default: object = None,
        after: str | None = None,
        first: bool = False,
        aggregate: str | None = None,
    ) -> TableInfo:
        """Add a nullable column, at the end or in the stated place.

        Existing rows have `default` in it, and so have rows that are written with the columns of an
        earlier version of the schema; without a default they have null.

        `aggregate` is the column's merge function in an aggregation table, as property
        `fields.NAME.agg` at creation. Rows written before the column was added count as null.

        A sequence of names adds a field inside a column: `("address", "street")`, and through
        arrays and maps `("orders", "element", "price")` and `("sizes", "value", "unit")`.
        """
        where = ".".join(names(name, argument="name"))
        column_type = canonical_type(arrow_type(data_type, where=where), where=where)
        change: dict[str, Any] = {
            "add": name if isinstance(name, str) else list(name),
            "type": type_to_json(column_type),
            "comment": comment,
            "first": first,
        }
        if default is not None:
            change["default"] = default_text(default, column_type, where=f"column '{where}'")
        change |= {} if after is None else {"after": after}
        change |= {} if aggregate is None else {"aggregate": aggregate}
        return self.alter_schema(path, [change])

    def rename_column(self, path: str, name: str, new_name: str) -> TableInfo:
        """Rename a column; keys, partitioning and properties that use it follow."""
        return self.alter_schema(path, [{"rename": name, "to": new_name}])

    def widen_column(self, path: str, name: str | Sequence[str], data_type: TypeForm) -> TableInfo:
        """Give a column a larger type: int to bigint, float to double, decimals more digits.

        A sequence of names widens a field inside a column, as in `add_column`.
        """
        where = ".".join(names(name, argument="name"))
        json_type = type_to_json(canonical_type(arrow_type(data_type, where=where), where=where))
        column_path = name if isinstance(name, str) else list(name)
        return self.alter_schema(path, [{"widen": column_path, "to": json_type}])

    def drop_not_null(self, path: str, name: str) -> TableInfo:
        """Let a column be null from now on; this cannot be undone."""
        return self.alter_schema(path, [{"drop_not_null": name}])

    def comment_column(self, path: str, name: str, comment: str) -> TableInfo:
        """Set the comment of a column."""
        return self.alter_schema(path, [{"comment": name, "to": comment}])

    def drop_column(self, path: str, name: str, *, confirm: str) -> TableInfo:
        """Hide a column for good; `confirm` repeats its name. Stored values stay in their files."""
        return self.alter_schema(path, [{"drop": name, "confirm": confirm}])

    def alter_partitioning(self, path: str, partitioned_by: Sequence[str]) -> TableInfo:
        """Partition the lake by these expressions from now on, as in `["day(at)"]`.

        Existing files stay in their partitions.
        """
        answer = self._transport.request_json(
            "PUT",
            f"/v1/tables/{TablePath.parse(path)}/partitioning",
            body={"partitioned_by": list(names(partitioned_by, argument="partitioned_by"))},
        )
        return self._remember(TableInfo.from_json(answer))

    # -- the lake ------------------------------------------------------------------------------

    def wait_tiered(self, path: str, *, timeout_s: float = 600.0) -> None:
        """Return when all rows that the table has at the time of the call are in the lake.

        The call hastens nothing: workers move rows within the table's `table.datalake.freshness`.

        Raises:
            UnavailableError: after `timeout_s`; names the missing rows and the state of the
                workers.
            InvalidRequestError: the table is not tiered to the lake.
        """
        until = time.monotonic() + seconds(timeout_s, argument="timeout_s")
        state = self.table_state(path)
        wait, attempts = TieredWait.of(state), 0
        while wait.missing_rows_of(state):
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                rounds = self._rounds_of(str(state.table.path))
                raise UnavailableError(wait.late_message(state, timeout_s=timeout_s, rounds=rounds))
            attempts += 1
            pause(min(POLL_BACKOFF.jittered_after(attempts), remaining_s))
            state = self.table_state(path)

    def _rounds_of(self, name: str) -> str:
        """Return the state of a table's rounds, in words."""
        try:
            status: Any = self._transport.request_json(
                "GET", "/v1/status", query={"table": name}, table=name
            )
        except ForbiddenError:
            return "this token may not see which workers run (read on service)"
        return rounds_text(name, status)

    def lake_catalog(self) -> LakeCatalog:
        """Return the address of the Iceberg catalog with the service's lake tables."""
        answer: Any = self._transport.request_json("GET", "/v1/lake/catalog")
        transport = self._transport
        current = transport.endpoint
        other_urls = [url for url in transport.routes.endpoints.urls if url != current]
        return LakeCatalog.from_json(answer).at(current, *other_urls, token=transport.token)

    def lake_divergence(self, path: str) -> LakeDivergence | None:
        """Return which rows a table keeps and loses if it adopts the lake in place of its log.

        None if there is no such table. Raises `TableExistsError` if the lake has the log's history.
        """
        try:
            answer = self._adopt(path, {"dry_run": True, "replace": True})
        except TableNotFoundError:
            return None
        return LakeDivergence.from_json(answer)

    def adopt_table(self, path: str, *, force: bool = False, replace: bool = False) -> TableInfo:
        """Make a table of the lake table at `path`, to which a Streamhouse service tiered.

        The table has the columns, keys, buckets and properties of the tiered table, and all tiered
        rows; new rows get the offsets after them. The former owner cannot tier to the lake table
        any more. The database must exist. Calling again changes nothing.

        Args:
            force: also if another service tiered to the lake table within the last ten minutes.
            replace: in place of a table whose log differs from the lake; the log's files are set
                aside (`lake_divergence` names the rows).

        Raises:
            UnsupportedError: no table can go on from this lake table; says why.
            FencedError: another service may still own the lake table.
            TableExistsError: another table has the name.
            TableNotFoundError: the lake catalog has no such table.
        """
        body = {"force": force, "replace": True} if replace else {"force": force}
        return TableInfo.from_json(self._adopt(path, body))

    def _adopt(self, path: str, body: Mapping[str, bool]) -> dict[str, Any]:
        answer: dict[str, Any] = self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/adopt",
            body=body,
            wait_s=_ADOPTION_WAIT_S_MAX,
        )
        return answer

    def pin_snapshot(self, path: str, snapshot_id: int, *, holder: str, ttl_s: float) -> None:
        """Keep a lake snapshot from being expired for `ttl_s` seconds, a week at most.

        A holder has one pin a table: another call moves or prolongs the pin. Maintenance may have
        expired the snapshot just before: open the snapshot after this call.

        Args:
            holder: 1 to 200 letters, digits and `._:@-`, chosen to be unique.

        Raises:
            OverloadedError: the table has the most pins allowed.
        """
        self._transport.request_json(
            "PUT",
            _pin_path(path, holder),
            body={"snapshot_id": str(snapshot_id), "ttl_ms": max(1, round(ttl_s * 1000))},
            is_repeatable=True,
        )

    def unpin_snapshot(self, path: str, *, holder: str) -> None:
        """End the holder's pin; a missing pin is no error."""
        self._transport.request_json("DELETE", _pin_path(path, holder), is_repeatable=True)

    def pinned_snapshots(self, path: str) -> dict[str, int]:
        """Return holder -> id of the pinned lake snapshot."""
        answer = self._transport.request_json("GET", _pins_path(path))
        return {pin["holder"]: int(pin["snapshot_id"]) for pin in answer["pins"]}

    # -- the service ---------------------------------------------------------------------------

    def status(self, *, detail: Literal["full", "brief"] = "full") -> dict[str, Any]:
        """Return the figures of the service's page at `/`, as docs/http_api.md describes them.

        The full status has the first tables by name, 200 unless configured otherwise; the brief
        status up to 2,000.
        """
        query = None if detail == "full" else {"detail": detail}
        answer: dict[str, Any] = self._transport.request_json("GET", "/v1/status", query=query)
        return answer

    def shards(self) -> list[dict[str, Any]]:
        """Return the processes of the service, as docs/http_api.md describes them.

        The list is empty for a service without a journal: a single process.
        """
        answer: dict[str, Any] = self._transport.request_json("GET", "/v1/shards")
        return list(answer["shards"])

    def move_table(self, path: str, shard: str) -> None:
        """Move a table to another shard; returns when the new shard serves the table.

        Reads and writes go on meanwhile; writes wait at the end of the move. Another call resumes
        an interrupted move, and changes nothing after a complete one.

        Raises:
            UnavailableError: the table is in use by a transaction or a tiering round, or the shard
                has no owner; the table stays where it is.
        """
        route = f"/v1/tables/{TablePath.parse(path)}/move"
        is_done = False
        while not is_done:
            answer: Any = self._transport.request_json(
                "POST", route, body={"to": shard}, is_repeatable=True
            )
            is_done = answer["is_done"] is True

    def stage_backup(self, *, with_lake: bool = False, timeout_s: float = 600.0) -> dict[str, Any]:
        """Stage a backup below the service's data directory; return its place and contents.

        Appends go on meanwhile; creating and dropping tables waits. Copy the files, then call
        `discard_backup`.

        Raises:
            AlreadyExistsError: another backup is staged.
        """
        answer: dict[str, Any] = self._transport.request_json(
            "POST", _BACKUP_ROUTE, body={"with_lake": with_lake}, wait_s=timeout_s
        )
        return answer

    def discard_backup(self) -> None:
        """Remove a staged backup; a missing one is no error."""
        self._transport.request_json("DELETE", _BACKUP_ROUTE, is_repeatable=True)


def _pins_path(path: str) -> str:
    return f"/v1/tables/{TablePath.parse(path)}/lake/pins"


def _pin_path(path: str, holder: str) -> str:
    return f"{_pins_path(path)}/{quote(holder, safe='')}"
