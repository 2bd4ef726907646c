"""The engine and a whole service in this process, without a socket.

`open_manager` is the engine; `ClaimWorld` and `ExpiryWorld` put one of its jobs beside it, with
clocks that a test moves. `in_process_service` sends requests straight into the ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import OverloadedError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from streamhouse.core.model.table_state import TieringAssignment, TieringReport
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.traces.spans import Spans
from streamhouse.core.wire.arrow_body import encode_append_body
from streamhouse.reading.lake_only.lake_history import IcebergHistory
from streamhouse.storage_service.catalog_door.catalog_door import CatalogDoor
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime, clock_us
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.engine.table_moves import TableMoves
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.engine.tiering_desk.tiering_round import (
    ClaimAnswer,
    RoundProgress,
)
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.upkeep._row_expiry import RowExpiry
from streamhouse.storage_service.kafka_door._record_schemas import RecordSchemas
from streamhouse.storage_service.kafka_door.door import KafkaDoor
from streamhouse.storage_service.kafka_door.registry.registry_door import RegistryDoor
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.live.live_places import LivePlaces
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.owners import LeaseOwners
from streamhouse.storage_service.server._app import ServiceApp
from streamhouse.storage_service.server._gauges import read_state
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.http.http_exchange import Tenure
from streamhouse.storage_service.server.routes import ROUTES, RouteTable
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards._moves import MoveDesk
from streamhouse.storage_service.server.shards.other_shards import Shards
from streamhouse.storage_service.server.shards.peers import HttpPeers
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.asgi_call import AsgiAnswer, AsgiCall
from tests.support.kv_world import looked_up

__all__ = [
    "EVENTS",
    "HOUR_US",
    "ROUTE_TABLE",
    "TTL",
    "ClaimWorld",
    "ExpiryWorld",
    "InProcessService",
    "append_body",
    "begin",
    "claim_world",
    "event_rows",
    "expiry_of",
    "expiry_world",
    "ids_of",
    "in_process_service",
    "later",
    "make_table",
    "open_manager",
    "routed",
    "stage_parts",
    "staged_batches",
    "table_descriptor",
    "until",
    "visible_ends",
    "write_alone",
]


ROUTE_TABLE = RouteTable([*ROUTES, *CatalogDoor.routes, *KafkaDoor.routes, *RegistryDoor.routes])
"""The rows of a service with every door."""
EVENTS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
"""The schema of most tests' tables."""


class InProcessService:
    """The service, and requests to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.kafka = KafkaDoor(service.config)
        self.doors = Doors([CatalogDoor(service.config), self.kafka, RegistryDoor()])
        self.app = ServiceApp(service, self.doors)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        json_body: Any = None,
    ) -> AsgiAnswer:
        """Send one request and return the whole answer."""
        if json_body is not None:
            body = json.dumps(json_body).encode()
            headers = {"content-type": "application/json", **(headers or {})}
        call = AsgiCall(
            self.app,
            method,
            path,
            query=query,
            headers=headers,
            chunks=[body],
            content_length=len(body),
        )
        answer = await call.run()
        assert answer.is_complete
        return answer

    def start(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[AsgiCall, asyncio.Task[AsgiAnswer]]:
        """Begin a request that waits or streams."""
        call = AsgiCall(self.app, method, path, query=query, headers=headers)
        return call, asyncio.ensure_future(call.run())

    async def create_table(
        self, path: str = "events", schema: pa.Schema = EVENTS, **fields: Any
    ) -> dict[str, Any]:
        """Create a table as `table_descriptor` has it."""
        answer = await self.call(
            "POST", "/v1/tables", json_body=table_descriptor(path, schema, **fields).to_json()
        )
        assert answer.status == 201, answer.body
        created: dict[str, Any] = answer.json()
        return created

    async def append(
        self,
        parts: Iterable[tuple[int | None, int, pa.RecordBatch]],
        *,
        path: str = "events",
        writer_id: str | None = None,
    ) -> AsgiAnswer:
        """Append (bucket, sequence, rows) parts to a table of `EVENTS`."""
        return await self.call(
            "POST",
            f"/v1/tables/{path}/append",
            query={} if writer_id is None else {"writer_id": writer_id},
            body=append_body(EVENTS, parts),
        )


@contextlib.asynccontextmanager
async def open_manager(
    data_dir: Path,
    *,
    recovery: KeyRecovery | None = None,
    clock_us: Callable[[], int] = clock_us,
    directory: DataDirectory | None = None,
    replication: Replication | None = None,
    **config: Any,
) -> AsyncIterator[TabletManager]:
    """Open the tables of `data_dir`; leaving closes them cleanly."""
    with ThreadPoolExecutor(2) as executor:
        manager = await TabletManager.open(
            ServiceConfig(data_dir=data_dir, **config),
            runtime=Runtime(executor=executor, observer=ServiceMetrics(), clock_us=clock_us),
            recovery=recovery,
            directory=directory,
            replication=replication,
        )
        try:
            yield manager
        finally:
            await manager.close()


def later(manager: TabletManager, us: int) -> Runtime:
    """Return the runtime of `manager` with a clock that is so much ahead."""
    return dataclasses.replace(manager.runtime, clock_us=lambda: clock_us() + us)


@contextlib.asynccontextmanager
async def in_process_service(
    data_dir: Path,
    *,
    tenure: Tenure | None = None,
    directory: ShardDirectory | None = None,
    owners: LeaseOwners | None = None,
    peers: HttpPeers | None = None,
    replication: Replication | None = None,
    store: ObjectStore | None = None,
    spans: Spans | None = None,
    **config: Any,
) -> AsyncIterator[InProcessService]:
    """Run a service with these settings; leaving closes it cleanly.

    With `directory`, `owners` and `peers` it is one of several shards, between which tables move
    if there is a `store`.
    """
    with ThreadPoolExecutor(2) as executor:
        settings = ServiceConfig(data_dir=data_dir, **config)
        metrics = ServiceMetrics()
        runtime = Runtime(executor=executor, observer=metrics)
        manager = await TabletManager.open(
            settings,
            runtime=runtime,
            names=directory,
            replication=replication,
            sidecars=(LivePlaces, RecordSchemas),
        )
        shards, moves = None, None
        if directory is not None and owners is not None and peers is not None:
            # All are this process: its load says nothing of one of them.
            shards = Shards(directory, owners, manager, peers, load_millicores=lambda: 0)
            if store is not None:
                moves = MoveDesk(TableMoves(manager, directory, store), shards, settings)
        lake_reads = LakeReads(functools.partial(_lake_history, settings))
        try:
            service = Service(
                settings,
                manager,
                executor,
                metrics,
                lake_reads=lake_reads,
                tenure=tenure,
                shards=shards,
                moves=moves,
                spans=spans,
            )
            metrics.watch(functools.partial(read_state, service))
            http = InProcessService(service)
            try:
                yield http
            finally:
                for door in http.doors:
                    await asyncio.to_thread(door.close)
        finally:
            lake_reads.close()
            if moves is not None:
                await moves.close()
            if shards is not None:
                shards.close()
            await manager.close()


def _lake_history(settings: ServiceConfig) -> IcebergHistory:
    # Few tests read the lake, whose library takes a second to load.
    from streamhouse.reading.lake_only.lake_history import IcebergHistory

    return IcebergHistory(settings.lake_catalog())


def table_descriptor(
    path: str = "events", schema: pa.Schema = EVENTS, **fields: Any
) -> TableDescriptor:
    """Return a descriptor of a table, of `EVENTS` if nothing else is said."""
    return TableDescriptor(path=TablePath.parse(path), schema=Schema.from_arrow(schema), **fields)


def event_rows(start: int, end: int) -> pa.RecordBatch:
    """Return rows with ids [start, end)."""
    ids = range(start, end)
    return pa.record_batch([pa.array(ids, pa.int64()), [f"n{i}" for i in ids]], schema=EVENTS)


def routed(
    bucket: int, rows: pa.RecordBatch, *, writer_id: int = 0, sequence: int = 0
) -> RoutedBatch:
    """Return rows on their way to a bucket."""
    return RoutedBatch(
        bucket=bucket,
        row_count=rows.num_rows,
        payload=memoryview(rows.serialize()),
        writer_id=writer_id,
        sequence=sequence,
    )


def append_body(
    schema: pa.Schema, parts: Iterable[tuple[int | None, int, pa.RecordBatch]]
) -> bytes:
    """Return an append request's body."""
    return encode_append_body(schema, parts).to_pybytes()


class ClaimWorld:
    """One service with tables to tier, and clocks that a test moves."""

    def __init__(self, manager: TabletManager) -> None:
        self.manager = manager
        self.seconds = 1_000.0
        self.tiering = TieringCoordinator(
            tables=manager.open_tables,
            save=manager._save_lake_state,
            wait_for_shown=lambda: None,
            runtime=dataclasses.replace(
                manager.runtime, clock_us=self._clock_us, monotonic_s=lambda: self.seconds
            ),
            lease_ms=10_000,
            backoff=Backoff(first_s=1.0, most_s=4.0),
        )
        self._last_append_us = 0

    def _clock_us(self) -> int:
        return self._last_append_us + round((self.seconds - 1_000.0) * 1_000_000)

    async def table(self, path: str = "events", **fields: Any) -> OpenTable:
        """Make a table with 5 rows in each of its two buckets."""
        table = await self.manager.create_table(table_descriptor(path, bucket_count=2, **fields))
        return await self.append(table)

    async def append(self, table: OpenTable) -> OpenTable:
        rows = event_rows(0, 5)
        appended = await self.manager.append(table, [routed(0, rows), routed(1, rows)])
        self._last_append_us = appended.timestamp_us
        return table

    async def claim(self, worker: str = "one", **arguments: Any) -> ClaimAnswer:
        return await self.tiering.claim(worker, **{"tables": None, "force": True, **arguments})

    async def granted(self, worker: str = "one", **arguments: Any) -> TieringAssignment:
        answer = await self.claim(worker, **arguments)
        assert answer.assignment is not None, answer
        return answer.assignment

    async def heartbeat(
        self, table: OpenTable, *, epoch: int, progress: RoundProgress | None = None
    ) -> None:
        table_id = table.info.table_id
        await self.tiering.heartbeat(table, table_id=table_id, epoch=epoch, progress=progress)

    async def fail(self, table: OpenTable, *, epoch: int, error: str) -> int:
        table_id = table.info.table_id
        return await self.tiering.fail(table, table_id=table_id, epoch=epoch, error=error)

    async def complete(self, table: OpenTable, epoch: int, **changes: Any) -> Any:
        report: dict[str, Any] = {
            "table_id": table.info.table_id,
            "snapshot_id": 11,
            "table_uuid": "uuid",
            "tiered_offsets": {0: 5, 1: 5},
            **changes,
        }
        return await self.tiering.complete(table, TieringReport(epoch=epoch, **report))


@contextlib.asynccontextmanager
async def claim_world(data_dir: Path) -> AsyncIterator[ClaimWorld]:
    """Open a world on the tables of a directory; leaving closes them cleanly."""
    async with open_manager(data_dir) as manager:
        yield ClaimWorld(manager)


HOUR_US = 3_600_000_000
TTL = {"table.datalake.ttl": "1h"}


def expiry_of(
    manager: TabletManager,
    *,
    clock_us: Callable[[], int],
    monotonic_s: Callable[[], float],
    thread_s: Callable[[], float] = time.thread_time,
    check_room: Callable[[], None] = lambda: None,
    observer: Any = None,
    tables: Sequence[OpenTable] | None = None,
) -> RowExpiry:
    """Return what looks after the tables of `manager`, or `tables` of them, by clocks to set."""
    return RowExpiry(
        tables=manager.open_tables if tables is None else lambda: tables,
        directory=manager.directory,
        check_room=check_room,
        runtime=dataclasses.replace(
            manager.runtime,
            observer=observer or manager.runtime.observer,
            clock_us=clock_us,
            monotonic_s=monotonic_s,
            thread_s=thread_s,
        ),
    )


class ExpiryWorld:
    """One service's tables whose rows by key age, and what looks after them.

    `room` is what refuses more rows; `expired` counts each piece.
    """

    def __init__(self, manager: TabletManager) -> None:
        self.manager = manager
        self.ahead_us = 0
        self.monotonic_s = self.thread_s = 0.0
        self.room: list[OverloadedError] = []
        self.expired: list[int] = []
        self.expiry = expiry_of(
            manager,
            check_room=self._check_room,
            clock_us=lambda: clock_us() + self.ahead_us,
            observer=self,
            monotonic_s=lambda: self.monotonic_s,
            thread_s=lambda: self.thread_s,
        )

    def ages_file(self, table: OpenTable) -> Path:
        """Where the marks of a table are."""
        return self.manager.directory.row_ages_file(table.info.table_id).path

    def rows_expired(self, count: int) -> None:
        """Be told of deleted rows."""
        self.expired.append(count)

    def _check_room(self) -> None:
        if self.room:
            raise self.room[0]

    async def table(self, name: str = "db", *, properties: dict[str, str] = TTL) -> OpenTable:
        """Make a table of one bucket."""
        return await self.manager.create_table(
            table_descriptor(f"default.{name}", primary_key=("id",), properties=properties)
        )

    async def upsert(
        self, table: OpenTable, ids: Iterable[int], name: str = "n", *, bucket: int = 0
    ) -> Appended:
        """Write rows of these ids to a bucket."""
        chosen = list(ids)
        rows = pa.record_batch([pa.array(chosen, pa.int64()), [name] * len(chosen)], schema=EVENTS)
        write = KeyWrite(bucket, rows)
        return await self.manager.write_keys(table, [write], columns=None, writer_id=0)

    async def look(self, *, ahead_us: int = 2 * HOUR_US) -> None:
        """Look as of that time."""
        self.ahead_us = ahead_us
        await self.expiry.look()


def ids_of(table: OpenTable) -> list[int]:
    """Return the ids below 100 that the first bucket has."""
    keys = pa.record_batch([pa.array(range(100), pa.int64())], names=["id"])
    ids: list[int] = looked_up(table.key_buckets[0].rows, keys).rows.column("id").to_pylist()
    return ids


@contextlib.asynccontextmanager
async def expiry_world(data_dir: Path, **config: Any) -> AsyncIterator[ExpiryWorld]:
    """Open a world on the tables of a directory; leaving closes them cleanly."""
    async with open_manager(data_dir, **config) as manager:
        yield ExpiryWorld(manager)


async def make_table(manager: TabletManager, is_keyed: bool, path: str = "events") -> OpenTable:
    """Make a table of `EVENTS` with two buckets."""
    key = ("id",) if is_keyed else ()
    return await manager.create_table(table_descriptor(path, bucket_count=2, primary_key=key))


async def begin(
    transactions: TableTransactions,
    is_keyed: bool = False,
    operation: TransactionOperation | None = None,
    *,
    version: int | None = None,
) -> str:
    """Begin a transaction of a minute, by default one that adds rows; return its id."""
    adds = TransactionOperation.UPSERT if is_keyed else TransactionOperation.APPEND
    operation = operation or adds
    app_id = None if version is None else "app"
    begun, _ = await transactions.begin(
        operation, columns=None, app_id=app_id, version=version, timeout_ms=60_000
    )
    return begun


def staged_batches(start: int, count: int) -> list[RoutedBatch]:
    """Return rows for both buckets."""
    return [
        RoutedBatch(
            bucket,
            count,
            memoryview(event_rows(first, first + count).serialize()).cast("B"),
        )
        for bucket, first in ((0, start), (1, start + count))
    ]


async def stage_parts(transactions: TableTransactions, begun: str, parts: int = 6) -> list[str]:
    """Stage parts of 40 rows; return their ids."""
    return [
        (await transactions.stage(begun, EVENTS, staged_batches(100 * n, 20), token=None))[0]
        for n in range(parts)
    ]


async def write_alone(manager: TabletManager, table: OpenTable, number: int) -> None:
    """Write one row outside any transaction."""
    row = event_rows(10_000 + number, 10_001 + number)
    if isinstance(table, KeyTable):
        await manager.write_keys(table, [KeyWrite(0, row)], columns=None, writer_id=0)
    else:
        await manager.append(table, [routed(0, row)])


def visible_ends(table: OpenTable) -> list[int]:
    """Return the high watermarks."""
    return [tablet.high_watermark for tablet in table.tablets]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
