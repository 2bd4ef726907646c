"""StorageClient: tables, appends and reads of the storage service, in the service's own words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import pyarrow as pa

from streamhouse.storage_service.client import reads
from streamhouse.storage_service.client.adoption_calls import AdoptionCalls
from streamhouse.storage_service.client.append_writer import AppendWriter
from streamhouse.storage_service.client.backup_calls import BackupCalls
from streamhouse.storage_service.client.endpoint import with_ca_file
from streamhouse.storage_service.client.key_value_calls import KeyValueCalls
from streamhouse.storage_service.client.lake_pin_calls import LakePinCalls
from streamhouse.storage_service.client.log_batch import LogBatch
from streamhouse.storage_service.client.size_calls import SizeCalls
from streamhouse.storage_service.client.tables import SchemaCalls
from streamhouse.storage_service.client.tiering_calls import TieringCalls
from streamhouse.storage_service.client.transactions import TransactionCalls
from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.client.writes import Appender
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    TableNotFoundError,
)
from streamhouse.storage_service.model.lake import LakeCatalog
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["DEFAULT_ENDPOINT", "ENDPOINT_VARIABLE", "TOKEN_VARIABLE", "StorageClient"]

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:8765"
ENDPOINT_VARIABLE: Final = "STREAMHOUSE_ENDPOINT"
TOKEN_VARIABLE: Final = "STREAMHOUSE_TOKEN"

_Self = TypeVar("_Self", bound="StorageClient")


class StorageClient(
    AdoptionCalls,
    BackupCalls,
    SchemaCalls,
    SizeCalls,
    TieringCalls,
    LakePinCalls,
    KeyValueCalls,
    TransactionCalls,
):
    """A connection to one storage service. Thread-safe; close it or use it in a `with` block.

    Args:
        endpoint: the service's URL; default: `STREAMHOUSE_ENDPOINT`, else http://127.0.0.1:8765.
        token: the bearer token; default: `STREAMHOUSE_TOKEN`, else none.
        timeout_s: how long one call may take, retries included, besides waits it asks for.
        ca_file: certificates of the CAs that may vouch for an `https` endpoint; default:
            `STREAMHOUSE_CA_FILE`, else those the machine trusts.

    Every call raises a `StreamhouseError` whose message is one sentence, and `UnavailableError`
    when the service cannot be reached.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
    ) -> None:
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        self._endpoint = endpoint if ca_file is None else with_ca_file(endpoint, ca_file)
        self._transport = HttpTransport(
            self._endpoint,
            token=token or os.environ.get(TOKEN_VARIABLE) or None,
            timeout_s=timeout_s,
        )
        KeyValueCalls.__init__(self)
        self._appender = Appender(self._transport)
        self._tables: dict[TablePath, TableInfo] = {}
        self._tables_lock = threading.Lock()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The service's URL, with `#ca=FILE` if a CA file vouches for it."""
        return self._endpoint.rstrip("/")

    @property
    def transport(self) -> HttpTransport:
        """What sends the requests, for other modules of this package."""
        return self._transport

    def close(self) -> None:
        """Close the connections; a closed client must not be used again."""
        self._transport.close()

    # -- databases and tables ------------------------------------------------------------------

    def list_databases(self) -> list[str]:
        """Return the names of all databases, sorted."""
        return list(self._transport.request_json("GET", "/v1/databases")["databases"])

    def create_database(self, name: str) -> None:
        """Create a database; raises `DatabaseExistsError`."""
        self._transport.request_json("POST", "/v1/databases", body={"name": name})

    def status(self) -> dict[str, Any]:
        """Return what the service's page at `/` shows, as docs/http_api.md describes it."""
        answer: dict[str, Any] = self._transport.request_json("GET", "/v1/status")
        return answer

    def drop_database(self, name: str) -> None:
        """Drop an empty database; raises `DatabaseNotEmptyError`."""
        self._transport.request_json("DELETE", f"/v1/databases/{name}")

    def create_table(
        self,
        path: str,
        schema: pa.Schema,
        *,
        primary_key: Sequence[str] = (),
        bucket_count: int = 1,
        bucket_key: Sequence[str] = (),
        partitioned_by: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
    ) -> TableInfo:
        """Create a table.

        Args:
            path: `database.table`, or `table` in database `default`.
            schema: Arrow types that Spark and Iceberg share; others are refused by column name.
            primary_key: columns that make rows upsertable; empty makes a log table.
            bucket_count: how many buckets, the unit of order and of parallelism; fixed for life.
            bucket_key: rows equal here share a bucket; empty spreads rows evenly.
            partitioned_by: lake partitioning, as in `["region", "day(event_time)"]`.
            properties: `table.*` properties.

        Raises:
            InvalidSchemaError, InvalidNameError, UnknownOptionError, TableExistsError
        """
        descriptor = TableDescriptor(
            path=TablePath.parse(path),
            schema=Schema.from_arrow(schema),
            primary_key=tuple(primary_key),
            bucket_count=bucket_count,
            bucket_key=tuple(bucket_key),
            partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
            properties=dict(properties or {}),
        )
        answer = self._transport.request_json("POST", "/v1/tables", body=descriptor.to_json())
        return self._remember(TableInfo.from_json(answer))

    def drop_table(self, path: str, *, if_exists: bool = False, damaged: bool = False) -> None:
        """Drop a table and its log. Its lake table stays for other engines.

        A table that raises `TableDamagedError` is dropped with `damaged` only; its files stay on
        the service's disk.
        """
        parsed = TablePath.parse(path)
        self._forget(parsed)
        try:
            query = {"damaged": "true"} if damaged else None
            self._transport.request_json("DELETE", f"/v1/tables/{parsed}", query=query)
        except TableNotFoundError:
            if not if_exists:
                raise

    def list_tables(self, database: str | None = None) -> list[str]:
        """Return the paths of all tables, or of one database's, sorted."""
        query = None if database is None else {"database": database}
        return list(self._transport.request_json("GET", "/v1/tables", query=query)["tables"])

    def describe_table(self, path: str) -> TableInfo:
        """Return the table's schema, bucketing, partitioning and properties."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}")
        return self._remember(TableInfo.from_json(answer))

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
            body={"set": dict(updates or {}), "remove": list(removals)},
        )
        return self._remember(TableInfo.from_json(answer))

    # -- writes --------------------------------------------------------------------------------

    def append(
        self,
        path: str,
        data: pa.Table | pa.RecordBatch,
        *,
        writer: AppendWriter | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Append rows to a log table; when it returns they are durable and visible.

        Columns are matched by name. Large data is sent in several requests, each of them atomic.
        Retries inside the call never store a row twice.

        Args:
            writer: number the batches under this writer; a call that raised `UnknownOutcomeError`
                may then be repeated with the same data and a copy of the writer's state.

        Returns:
            bucket -> (start offset, end offset) of the rows, for the buckets that got any; when
            other writers append meanwhile, rows of theirs may lie between.

        Raises:
            SchemaMismatchError, UnknownColumnError: naming table, column and row; nothing stored.
        """
        return self._with_table(
            path, lambda table: self._appender.append(table, data, writer=writer)
        )

    # -- reads ---------------------------------------------------------------------------------

    def fetch(
        self,
        path: str,
        bucket: int,
        offset: int,
        *,
        columns: Sequence[str] | None = None,
        max_bytes: int = reads.FETCH_BYTES_DEFAULT,
        max_wait_ms: int = 0,
        end_offset: int | None = None,
        schema_id: int | None = None,
    ) -> list[LogBatch]:
        """Return log rows of one bucket from `offset` on, about `max_bytes` of them.

        Rows come in version `schema_id` of the table's schema, by default the current one.

        At the end of the log it waits up to `max_wait_ms` for an append and returns an empty list
        if none comes. Raises `OffsetOutOfRangeError` naming the valid range.
        """
        return reads.fetch(
            self._transport,
            str(TablePath.parse(path)),
            bucket,
            offset,
            columns=columns,
            max_bytes=max_bytes,
            max_wait_ms=max_wait_ms,
            end_offset=end_offset,
            schema_id=schema_id,
            node=self._node(path, bucket),
        )

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = reads.FETCH_BYTES_DEFAULT,
        schema_id: int | None = None,
    ) -> Iterator[LogBatch]:
        """Yield exactly the log rows [start, end) of one bucket, in order, page by page.

        Rows come in version `schema_id` of the table's schema, by default the current one when
        the first page is read.
        """
        return reads.read_range(
            self._transport,
            str(TablePath.parse(path)),
            bucket,
            start,
            end,
            columns=columns,
            page_bytes=page_bytes,
            schema_id=self._version(path, schema_id),
            node=self._node(path, bucket),
        )

    def subscribe(
        self,
        path: str,
        *,
        start: Literal["latest", "earliest"] | Mapping[int, int] = "latest",
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
    ) -> Iterator[LogBatch]:
        """Follow a table: yield log batches as they become durable, for ever.

        The schema stays what it is now, or version `schema_id`, also when the table's changes.

        The service pushes; within a bucket rows come in offset order, each once, also when the
        connection breaks in between. `start` is `latest`, `earliest` (the log's oldest row), or
        bucket -> offset for only those buckets.
        """
        parsed = str(TablePath.parse(path))
        if start == "latest":
            offsets = {b: p.high_watermark for b, p in self.positions(path).items()}
        elif start == "earliest":
            offsets = {b: p.log_start_offset for b, p in self.positions(path).items()}
        elif isinstance(start, Mapping):
            offsets = dict(start)
        else:
            raise InvalidRequestError(
                f"subscribe: start must be 'latest', 'earliest' or bucket -> offset, not {start!r}"
            )
        return reads.subscribe(
            self._transport,
            parsed,
            start=offsets,
            columns=columns,
            schema_id=self._version(path, schema_id),
        )

    def positions(self, path: str) -> dict[int, BucketPositions]:
        """Return where every bucket stands, as one consistent cut."""
        return dict(self.table_state(path).positions)

    def table_state(
        self, path: str, *, after: Mapping[int, int] | None = None, max_wait_ms: int = 0
    ) -> TableState:
        """Return the table, its positions and its lake snapshot as one consistent cut.

        With `after` (bucket -> offset) it waits up to `max_wait_ms` until some bucket's high
        watermark is beyond it.
        """
        query: dict[str, str] = {}
        if after is not None:
            query["after"] = reads.offsets_to_text(after)
            query["max_wait_ms"] = str(max_wait_ms)
        answer = self._transport.request_json(
            "GET",
            f"/v1/tables/{TablePath.parse(path)}/state",
            query=query,
            wait_s=max_wait_ms / 1000,
        )
        state = TableState.from_json(answer)
        self._remember(state.table)
        return state

    def offsets_for_timestamp(self, path: str, timestamp_us: int) -> dict[int, int]:
        """Return per bucket the first log offset written at or after `timestamp_us`."""
        answer = self._transport.request_json(
            "GET",
            f"/v1/tables/{TablePath.parse(path)}/offsets",
            query={"timestamp_us": str(timestamp_us)},
        )
        return {int(b): int(offset) for b, offset in answer["offsets"].items()}

    def lake_catalog(self) -> LakeCatalog:
        """Return how to open the Iceberg catalog that the service's tables are tiered to."""
        answer: Any = self._transport.request_json("GET", "/v1/lake/catalog")
        return LakeCatalog.from_json(answer).at(self.endpoint, token=self._transport.token)

    # -- remembered tables ---------------------------------------------------------------------

    def _node(self, path: str, bucket: int) -> str:
        table = self._tables.get(TablePath.parse(path))
        return "" if table is None else table.nodes.get(bucket, "")

    def _remember(self, table: TableInfo) -> TableInfo:
        with self._tables_lock:
            self._tables[table.path] = table
        return table

    def _forget(self, path: TablePath) -> None:
        with self._tables_lock:
            self._tables.pop(path, None)
