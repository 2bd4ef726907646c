"""A whole service without a socket: requests go straight into the ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.runtime import Runtime, clock_us
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableDescriptor, TablePath
from streamhouse.storage_service.server.app import ServiceApp
from streamhouse.storage_service.server.gauges import read_gauges
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from streamhouse.storage_service.wire.arrow_body import encode_append_body
from tests.support.asgi_call import AsgiAnswer, AsgiCall

__all__ = [
    "EVENTS",
    "InProcessService",
    "append_body",
    "event_rows",
    "in_process_service",
    "later",
    "open_manager",
    "routed",
    "table_descriptor",
]

EVENTS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
"""The schema of most tests' tables."""


class InProcessService:
    """The service, and requests to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = ServiceApp(service)

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

    async def create_table(self, path: str = "events", **fields: Any) -> dict[str, Any]:
        """Create a table with `EVENTS` as its schema."""
        answer = await self.call(
            "POST", "/v1/tables", json_body=table_descriptor(path, **fields).to_json()
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
    **config: Any,
) -> AsyncIterator[TabletManager]:
    """Open the tables of `data_dir`; leaving closes them cleanly."""
    with ThreadPoolExecutor(2) as executor:
        manager = await TabletManager.open(
            ServiceConfig(data_dir=data_dir, **config),
            runtime=Runtime(executor=executor, observer=ServiceMetrics(), clock_us=clock_us),
            recovery=recovery,
        )
        try:
            yield manager
        finally:
            await manager.close()


def later(manager: TabletManager, us: int) -> Runtime:
    """Return the runtime of `manager` with a clock that is so much ahead."""
    return dataclasses.replace(manager.runtime, clock_us=lambda: clock_us() + us)


@contextlib.asynccontextmanager
async def in_process_service(data_dir: Path, **config: Any) -> AsyncIterator[InProcessService]:
    """Run a service with these settings; leaving closes it cleanly."""
    with ThreadPoolExecutor(2) as executor:
        settings = ServiceConfig(data_dir=data_dir, **config)
        metrics = ServiceMetrics()
        runtime = Runtime(executor=executor, observer=metrics)
        manager = await TabletManager.open(settings, runtime=runtime)
        try:
            service = Service(settings, manager, executor, metrics)
            metrics.watch(
                tables=manager.open_tables,
                damaged_tables=manager.damaged_tables,
                tiering=manager.tiering,
                gauges=functools.partial(read_gauges, service),
                tables_max=settings.metrics_tables_max,
            )
            yield InProcessService(service)
        finally:
            await manager.close()


def table_descriptor(path: str = "events", **fields: Any) -> TableDescriptor:
    """Return a descriptor of a table of `EVENTS`."""
    return TableDescriptor(path=TablePath.parse(path), schema=Schema.from_arrow(EVENTS), **fields)


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
