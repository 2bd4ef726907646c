"""A service in this process with its live cuts, a client of it, and rounds of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.table import StaticTable

from streamhouse.client import StorageClient, TieringIdle
from streamhouse.client.http._http_connection import Answer
from streamhouse.client.http._transport import HttpTransport
from streamhouse.core.errors import error_for_code
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table import TablePath
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.reading.live.live_table import LiveCut
from streamhouse.reading.tail.lake_task import run_split
from streamhouse.storage_service.catalog_door.catalog_door import CatalogDoor
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.live.live_cuts import LiveCuts
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.tiering.round._round import TieringRound
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    in_process_service,
)

__all__ = ["Caller", "InProcessTransport", "LiveWorld", "live_world", "rows_of"]


class InProcessTransport(HttpTransport):
    """A client's requests straight into the application, from threads other than its own."""

    def __init__(self, service: InProcessService) -> None:
        super().__init__("http://127.0.0.1:1", token=None, timeout_s=60)
        self._service = service
        self._loop = asyncio.get_running_loop()

    def request(
        self, method: str, path: str, *, query: Any = None, body: Any = None, **_: Any
    ) -> Answer:
        """See `HttpTransport.request`."""
        call = self._service.call(
            method, path, query=query, body=b"" if body is None else bytes(body)
        )
        answer = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        if answer.status >= 400:
            error = answer.json()["error"]
            raise error_for_code(error["code"], error["message"])
        headers = {name.encode(): value.encode() for name, value in answer.headers.items()}
        return Answer(answer.status, headers, answer.body)


class Caller:
    """The parts of a request's exchange that a build needs."""

    share = "test"

    def __init__(self) -> None:
        self.hold: AnswerHold | None = None

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """See `Answered.wait`."""
        await waiter


class LiveWorld:
    """The service, and its live cuts as the catalog's door has them."""

    def __init__(self, http: InProcessService) -> None:
        self.http = http
        self.service = http.service
        (self.door,) = (door for door in http.doors if isinstance(door, CatalogDoor))
        assert self.door._live is not None
        self.live: LiveCuts = self.door._live
        self.client = StorageClient("http://127.0.0.1:1")
        self.client._transport.close()
        self.client._transport = InProcessTransport(http)
        identified = self.live._builder._opening.described
        self.lake = IcebergLake(identified)

    def table(self, path: str = "events") -> OpenTable:
        return self.service.table(path)

    async def cut(self, path: str = "events", role: LakeRole = LakeRole.ROWS) -> LiveCut:
        return await self.live.cut(Caller(), TablePath.parse(path), role)

    async def rows(self, path: str = "events") -> list[tuple[Any, ...]]:
        """Return (id, name) of the rows of a live table now, sorted, as stock pyiceberg reads."""
        return await asyncio.to_thread(rows_of, await self.cut(path))

    async def write(self, kind: str, rows: pa.RecordBatch, path: str = "events") -> None:
        """Append, upsert or delete rows."""
        body = append_body(rows.schema, [(None, 0, rows)])
        answer = await self.http.call("POST", f"/v1/tables/{path}/{kind}", body=body)
        assert answer.status == 200, answer.body

    async def transact(self, *parts: pa.RecordBatch, path: str = "events") -> None:
        """Append the parts in one transaction."""
        url = f"/v1/tables/{path}/transactions"
        begun = await self.http.call("POST", url, json_body={"operation": "append"})
        url += f"/{begun.json()['transaction_id']}"
        staged = [
            await self.http.call(
                "POST", f"{url}/stage", body=append_body(rows.schema, [(None, 0, rows)])
            )
            for rows in parts
        ]
        committed = await self.http.call(
            "POST",
            f"{url}/commit",
            json_body={"parts": [answer.json()["part"] for answer in staged]},
        )
        assert committed.status == 200, committed.body

    async def tier(self, path: str = "events") -> None:
        """Run a round of a table."""
        await asyncio.to_thread(self._tier, path)

    def _tier(self, path: str) -> None:
        assignment = self.client.claim_tiering("test", tables=[path], force=True)
        assert not isinstance(assignment, TieringIdle), assignment
        run = functools.partial(run_split, open_log=lambda _: contextlib.nullcontext(self.client))
        TieringRound(
            client=self.client,
            lake=self.lake,
            runner=ThreadRunner(2, run=run),
            assignment=assignment,
        ).run()

    def folders(self, path: str = "events") -> list[Path]:
        """Return the folders of live cuts of a table."""
        lake = self.service.config.data_dir / "lake" / "warehouse"
        return sorted(lake.glob(f"*/{path.rpartition('.')[2]}/*/live/*"))

    def set_clock(self, ahead_s: float) -> None:
        """Let the service's clock be so much ahead."""
        manager, real = self.service.manager, self.service.manager.runtime.clock_us
        clock = functools.partial(lambda: real() + int(ahead_s * 1_000_000))
        manager.runtime = dataclasses.replace(manager.runtime, clock_us=clock)
        for table in manager.open_tables():
            table.lake_pins._runtime = manager.runtime


def rows_of(cut: LiveCut) -> list[tuple[Any, ...]]:
    """Return (id, name) of a cut's rows, sorted."""
    read = StaticTable.from_metadata(cut.metadata_location or "").scan().to_arrow()
    return sorted(zip(*(read[name].to_pylist() for name in EVENTS.names), strict=True))


@contextlib.asynccontextmanager
async def live_world(data_dir: Path, **config: Any) -> AsyncIterator[LiveWorld]:
    """Run a service whose live cuts can be asked for; leaving closes it cleanly."""
    async with in_process_service(data_dir, **config) as http:
        world = LiveWorld(http)
        try:
            yield world
        finally:
            world.lake.close()
            await asyncio.to_thread(world.door.close)
