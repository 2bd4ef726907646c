"""The consumer groups of this process on the event loop: waits, timers, and coordinating shards.

Every live shard computes the same coordinating shard for a group. The list of live shards comes
from the store, and is cached for seconds. If another shard coordinates a group by then, the next
call of a member is refused, and the member joins again at the new coordinator.
"""

from __future__ import annotations

import asyncio
import math
import uuid
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError, TableDamagedError
from streamhouse.storage_service.kafka.groups.coordinator import Coordinator, GroupKey, GroupLimits
from streamhouse.storage_service.kafka.groups.coordinator_shard import coordinator_of
from streamhouse.storage_service.kafka.groups.messages import Identity
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.other_shards import ShardState

__all__ = ["GroupDesk", "code_for_members", "retriable_by_members"]

_T = TypeVar("_T")

_SHARDS_CACHED_S: Final = 5.0
_KEEP_S: Final = 60.0
# After these codes members of any client look up the coordinator, and try again.
_COORDINATOR_CODES: Final = frozenset(
    (
        ErrorCode.kafka_storage_error,
        # A second commit of the same position is harmless.
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
    )
)


def retriable_by_members(code: ErrorCode) -> ErrorCode:
    """Return `not_coordinator` for codes that members would not repeat, else `code`."""
    return ErrorCode.not_coordinator if code in _COORDINATOR_CODES else code


def code_for_members(error: StreamhouseError) -> ErrorCode:
    """Return the code of an error for members of groups.

    A damaged table waits for an operator. The code is not retriable: the group goes on with other
    tables.
    """
    code = error_code_of(error)
    return code if isinstance(error, TableDamagedError) else retriable_by_members(code)


class GroupDesk:
    """See the module. Event loop only."""

    def __init__(self, service: Service, *, limits: GroupLimits | None = None) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.coordinator = Coordinator(
            clock_s=self._loop.time, new_id=lambda: str(uuid.uuid4()), limits=limits
        )
        self._timer: asyncio.TimerHandle | None = None
        self._states: list[ShardState] = []
        self._states_until_s = -math.inf
        self._locks: weakref.WeakValueDictionary[GroupKey, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._position_topics: dict[GroupKey, set[str]] = {}
        """The topics in which a group with members has positions."""
        self._kept_s: dict[GroupKey, float] = {}
        self._keeping: dict[GroupKey, asyncio.Task[None]] = {}
        self.is_closed = False
        service.on_drain.append(self.close)

    def close(self) -> None:
        """End every wait; later calls get `not_coordinator`."""
        self.coordinator.end()
        self.is_closed = True
        self._look()

    async def settle(self) -> None:
        """Return when no positions are being kept any more; call after `close`."""
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    def key(self, exchange: Exchange, group_id: str) -> GroupKey:
        """Return the key of the caller's group."""
        return exchange.caller.name, group_id

    # -- time ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Set the timer for the coordinator's next deadline; called after each coordinator call."""
        due_s = self.coordinator.due_s()
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._look) if due_s < math.inf else None

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.coordinator.tick()
        for key in self._position_topics.keys() - dict(self.coordinator.groups()).keys():
            del self._position_topics[key]
            self._kept_s.pop(key, None)
        self.look()

    async def wait(
        self,
        exchange: Exchange,
        key: GroupKey,
        member_id: str,
        ask: Callable[[Callable[[_T], None]], None],
        *,
        on_answer: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """Return the coordinator's answer to a call, now or later.

        `on_answer` gets the answer at once, even if the caller is cancelled later. Raises
        `ClientGone` if the client closes the connection first, which abandons the wait.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        answers: list[_T] = []

        def answered(answer: _T) -> None:
            answers.append(answer)
            on_answer(answer)
            if not waiter.done():
                waiter.set_result(None)

        ask(answered)
        self.look()
        if not answers:
            try:
                await exchange.wait(waiter)
            finally:
                if not answers:
                    callback: Any = answered
                    self.coordinator.abandon_wait(key, member_id, callback)
                    self.look()
        return answers[0]

    def connection_lost(self, members: dict[GroupKey, str]) -> None:
        """Record the lost connection of `members`."""
        for key, member_id in members.items():
            self.coordinator.connection_lost(key, member_id)
        if members:
            self.look()

    def put_out(self, members: dict[GroupKey, str]) -> None:
        """Remove the members of a connection whose token was revoked."""
        for key, member_id in members.items():
            self.coordinator.leave(key, [Identity(member_id=member_id)])
        members.clear()
        self.look()

    # -- which shard -----------------------------------------------------------------------------

    async def refusal(self, group_id: str) -> ErrorCode | None:
        """Return the error code for a group of another coordinator."""
        shards = self._service.shards
        if shards is None or await self.shard_of(group_id) == shards.own:
            return None
        return ErrorCode.not_coordinator

    async def shard_of(self, group_id: str) -> str:
        """Return the coordinating shard of a group, in a service with shards.

        Raises `StreamhouseError` if the live shards are unknown.
        """
        shards = self._service.shards
        assert shards is not None
        live = {state.shard for state in await self._cached_states() if state.is_live}
        return coordinator_of(group_id, live | {shards.own})

    async def _cached_states(self) -> list[ShardState]:
        shards = self._service.shards
        assert shards is not None
        if self._loop.time() < self._states_until_s:
            return self._states
        if self._states:
            # The cached shards serve concurrent requests, and all requests if the store does not
            # answer.
            self._states_until_s = self._loop.time() + _SHARDS_CACHED_S
        try:
            self._states = await shards.states()
        except StreamhouseError:
            if not self._states:
                raise
        self._states_until_s = self._loop.time() + _SHARDS_CACHED_S
        return self._states

    # -- positions -------------------------------------------------------------------------------

    def in_order(self, key: GroupKey) -> asyncio.Lock:
        """Return the lock under which a group's commits happen in order, before any read.

        A member of the next generation therefore begins at the last commit of this generation.
        """
        return self._locks.setdefault(key, asyncio.Lock())

    def note_positions(self, key: GroupKey, topic: str) -> None:
        """Record that a group has positions in a topic, to keep while the group has members."""
        if self.coordinator.group(key) is not None:
            self._position_topics.setdefault(key, set()).add(topic)

    def due_to_keep(self, key: GroupKey) -> frozenset[str]:
        """Return the topics whose positions have to be kept alive now."""
        now_s = self._loop.time()
        if key in self._keeping or key not in self._position_topics:
            return frozenset()
        if now_s < self._kept_s.get(key, now_s - _KEEP_S) + _KEEP_S:
            return frozenset()
        self._kept_s[key] = now_s
        return frozenset(self._position_topics[key])

    def keep(self, key: GroupKey, keeping: Coroutine[Any, Any, None]) -> None:
        """Start keeping the topics of `due_to_keep`, in the background."""
        self._keeping[key] = asyncio.ensure_future(keeping)
        self._keeping[key].add_done_callback(lambda _: self._keeping.pop(key, None))
