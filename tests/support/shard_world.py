"""Several shards in this process, whose requests to each other go straight into the other's app."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from streamhouse.core.errors import UnavailableError, UnknownOutcomeError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.owners import Owner
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket
from streamhouse.storage_service.server.shards._moves import MoveDesk
from streamhouse.storage_service.server.shards.peers import PeerAnswer, PeerRequest
from tests.support.in_process_service import InProcessService, in_process_service

__all__ = ["ShardWorld", "frozen_move"]


async def frozen_move(
    service: InProcessService, path: TablePath, to: str, *, is_ready: bool = False
) -> tuple[MoveDesk, MoveTicket]:
    """Begin to move a table, and let it be copied and frozen: what is next decides the move.

    With `is_ready` the destination has all of it, and could serve it.
    """
    desk = service.service.moves
    assert desk is not None
    ticket = await desk.moves.begin(path, to)
    await desk.moves.copy(ticket)
    await desk._finish_step(ticket, [])
    await desk.moves.freeze(ticket)
    if is_ready:
        await desk._finish_step(ticket, [], is_whole=True)
    return desk, ticket


class ShardWorld:
    """Shards over one store. Every one answers at `http://<shard>:1`.

    Those of `away` have no live owner. Requests between shards set `is_asked` and wait for `go_on`,
    those for the last round of a move for `go_on_whole`, too; who is not in `services` does not
    answer them, and with `loses_answers` nobody hears what a change was answered.
    """

    def __init__(self, path: Path, store: ObjectStore) -> None:
        self._path = path
        self.store = store
        self.away: set[str] = set()
        self.services: dict[str, InProcessService] = {}
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.go_on_whole = asyncio.Event()
        self.go_on_whole.set()
        self.is_asked = asyncio.Event()
        self.loses_answers = False

    def of(self, shard: str) -> Owner | None:
        """See `LeaseOwners.of`."""
        return Owner(endpoint=f"http://{shard}:1", epoch=1, is_live=shard not in self.away)

    async def ask(self, endpoint: str, request: PeerRequest) -> PeerAnswer:
        """See `HttpPeers.ask`."""
        self.is_asked.set()
        await self.go_on.wait()
        if b'"is_whole": true' in request.body:
            await self.go_on_whole.wait()
        service = self.services.get(endpoint)
        if service is None:
            raise UnavailableError(f"{endpoint} does not answer")
        path, _, query = request.target.partition("?")
        answer = await service.call(
            request.method,
            path,
            query=dict(parse_qsl(query)),
            headers=request.headers,
            body=request.body,
        )
        if self.loses_answers and request.method != "GET":
            raise UnknownOutcomeError(f"{endpoint} did not answer")
        return PeerAnswer(
            answer.status, "application/json", answer.body, answer.headers.get("etag")
        )

    @contextlib.asynccontextmanager
    async def shard(
        self, name: str, *, lake: str = "lake", **config: Any
    ) -> AsyncIterator[InProcessService]:
        """Run the service of a shard, whose lake has a name: shards may share one."""
        async with in_process_service(
            self._path / name,
            directory=ShardDirectory(DirectoryObjects(self.store), shard=name),
            owners=self,
            peers=self,
            store=self.store,
            **config,
            catalog_properties={
                "type": "sql",
                "uri": f"sqlite:///{self._path / lake}.db",
                "warehouse": f"file://{self._path / lake}",
            },
        ) as service:
            assert service.service.shards is not None
            await service.service.shards.publish_record()
            self.services[f"http://{name}:1"] = service
            try:
                yield service
            finally:
                del self.services[f"http://{name}:1"]
