"""Moves of tables between shards: the requests between source and destination, with retries.

`engine/table_moves.py` has the steps and the durable state. A move goes on even if the caller stops
waiting. A repeated request waits for the move in progress, or succeeds if the table has arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    error_for_code,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.table_arrivals import Asked
from streamhouse.storage_service.engine.table_moves import TableMoves
from streamhouse.storage_service.engine.upkeep.jobs import Job
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket
from streamhouse.storage_service.server.shards.other_shards import Shards
from streamhouse.storage_service.server.shards.peers import PeerRequest

__all__ = ["MoveDesk"]

_logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

_LOOK_MS: Final = 2_000
# Less than callers and other shards wait for an answer.
_CALLER_WAIT_S: Final = 10.0
_FETCH_WAIT_S: Final = 5.0
_PAUSE_S: Final = 0.2
# A restarting destination comes back in this time; a dead destination must not block the table.
_SILENCE_S_MAX: Final = 30.0
# The limit of copy passes, for a table with writes faster than the copy.
_OPEN_PASSES_MAX: Final = 8
_REST_BYTES: Final = 4 << 20
# Longer than most rounds of tiering.
_IN_USE_S_MAX: Final = 15.0


class MoveDesk:
    """The moves from and to one shard. Event loop only."""

    def __init__(self, moves: TableMoves, shards: Shards, config: ServiceConfig) -> None:
        self.moves: Final = moves
        self._shards = shards
        self._catalog = _digest(config)
        self._tasks: dict[TablePath, asyncio.Task[None]] = {}

    def jobs(self) -> list[Job]:
        """Return the job that completes interrupted moves."""
        return [Job(name="moves", every_ms=_LOOK_MS, look=self.moves.look)]

    async def close(self) -> None:
        """Cancel the moves in progress; the next start completes or undoes them."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.moves.close()

    def is_moving(self, path: TablePath) -> bool:
        """Whether a table is moving away from this shard."""
        return path in self._tasks

    # -- the source --------------------------------------------------------------------------------

    async def move(self, path: TablePath, target: str, headers: Headers) -> bool:
        """Move a table of this shard; return False if the caller must ask again."""
        if target == self._shards.own and path not in self._tasks:
            return True
        task = self._tasks.get(path)
        if task is None:
            self.moves.check_moves_alone(path)
            task = asyncio.ensure_future(self._move(path, target, headers))
            self._tasks[path] = task
            task.add_done_callback(lambda done: self._ended(path, done))
        await asyncio.wait([task], timeout=_CALLER_WAIT_S)
        if not task.done():
            return False
        task.result()
        return True

    def _ended(self, path: TablePath, task: asyncio.Task[None]) -> None:
        del self._tasks[path]
        if not task.cancelled() and task.exception() is not None:
            _logger.warning("event=move_failed table=%s why=%r", path, task.exception())

    async def _move(self, path: TablePath, target: str, headers: Headers) -> None:
        """Move the table of rejected rows, then the table; a repeated call goes on with the rest.

        Between the two moves, writes that would reject rows get a retriable error.
        """
        companion = self.moves.moves_first(path)
        if companion is not None:
            await self._move_table(companion, target, headers)
        await self._move_table(path, target, headers)

    async def _move_table(self, path: TablePath, target: str, headers: Headers) -> None:
        await self._shards.endpoint_of_shard(target)
        ticket = await self.moves.begin(path, target)
        try:
            for _ in range(_OPEN_PASSES_MAX):
                size_bytes = await self.moves.copy(ticket)
                await self._finish_step(ticket, headers)
                if size_bytes <= _REST_BYTES:
                    break
            await self._freeze(ticket)
            await self._finish_step(ticket, headers, is_whole=True)
            is_moved = await self.moves.decide(ticket)
        except Exception as error:  # after any error, one of the two shards must serve the table
            is_moved = await self.moves.end(ticket)
            if not is_moved:
                raise
            _logger.warning("event=move_went_on table=%s why=%r", path, str(error))
            await self._tell(ticket, headers)
            return
        # The destination serves the table from now on, while this shard deletes its copy.
        notice = self._tell(ticket, headers)
        await asyncio.gather(self.moves.settle(ticket, is_moved=is_moved), notice)
        if not is_moved:
            raise UnavailableError(f"the move of table '{path}' was given up; try again")

    async def _tell(self, ticket: MoveTicket, headers: Headers) -> None:
        try:
            # This request only makes the destination look at the state of the move.
            await self._ask(ticket, headers, passes=1, is_whole=True)
        except StreamhouseError as error:
            # The destination also looks without a request, every `_LOOK_MS`.
            _logger.info("event=move_not_told table=%s why=%r", ticket.path, error.message)

    async def _freeze(self, ticket: MoveTicket) -> None:
        """Freeze the table between two rounds of tiering."""
        begun_s = time.monotonic()
        while True:
            try:
                return await self.moves.freeze(ticket)
            except UnavailableError:
                if self.moves.is_frozen(ticket) or time.monotonic() - begun_s > _IN_USE_S_MAX:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _finish_step(
        self, ticket: MoveTicket, headers: Headers, *, is_whole: bool = False
    ) -> None:
        passes, heard_s = self.moves.passes(ticket), time.monotonic()
        while True:
            try:
                if await self._ask(ticket, headers, passes=passes, is_whole=is_whole):
                    return
                heard_s = time.monotonic()
            except StreamhouseError as error:
                # The request may be repeated, whether or not the destination has handled it.
                is_passing = error.retriable or isinstance(error, UnknownOutcomeError)
                if not is_passing or time.monotonic() - heard_s > _SILENCE_S_MAX:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _ask(
        self, ticket: MoveTicket, headers: Headers, *, passes: int, is_whole: bool
    ) -> bool:
        """Ask the destination to go on; return whether the destination has finished this step."""
        endpoint = await self._shards.endpoint_of_shard(ticket.target)
        fields = {
            "ticket": ticket.to_json(),
            "catalog": self._catalog,
            "rounds": passes,
            "is_whole": is_whole,
        }
        body = json.dumps(fields).encode()
        target = f"/v1/tables/{ticket.path}/arrival"
        passed = [header for header in headers if header[0] == b"authorization"]
        request = PeerRequest.of(
            "POST", target, [*passed, (b"content-type", b"application/json")], body=body
        )
        answer = await self._shards.peers.ask(endpoint, request)
        try:
            answer_fields = json.loads(answer.body)
            if answer.status == 200:
                return answer_fields["is_done"] is True
            detail = answer_fields["error"]
            error = error_for_code(str(detail["code"]), str(detail["message"]))
        except (ValueError, KeyError, TypeError) as wrong:
            raise UnavailableError(f"the shard at {endpoint} answers no JSON of ours") from wrong
        raise error

    # -- the destination ---------------------------------------------------------------------------

    async def receive(
        self,
        path: TablePath,
        ticket: dict[str, Any],
        *,
        catalog: str,
        passes: int,
        is_whole: bool,
    ) -> bool:
        """Go on with the arrival of a table; return whether this step is finished."""
        read = MoveTicket.from_json(ticket)
        if read.path != path:
            raise InvalidRequestError(f"the move is of table '{read.path}', not of '{path}'")
        if catalog != self._catalog:
            raise InvalidRequestError(
                f"shards '{read.source}' and '{read.target}' have different lake catalogs: give"
                " both the same --catalog-property and --warehouse"
            )
        request = Asked(ticket=read, passes=passes, is_whole=is_whole)
        return await self.moves.arrivals.receive(request, wait_s=_FETCH_WAIT_S)


def _digest(config: ServiceConfig) -> str:
    """Return a digest of the lake catalog, equal for two shards with the same lake."""
    properties = config.lake_catalog().properties
    lake = [properties.get(name, "") for name in ("uri", "warehouse")]
    return hashlib.sha256(json.dumps(lake).encode()).hexdigest()
