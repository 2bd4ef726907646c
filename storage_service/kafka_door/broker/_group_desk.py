"""The consumer groups of this process on its event loop: waits, time, and whose groups they are.

A group is coordinated by one of the shards that are alive, the same one whoever asks. Which are
alive is asked of the store and known for seconds: members of a group that another shard coordinates
by then are told so by their next call, look for it, and join again there.
"""

from __future__ import annotations

import asyncio
import math
import uuid
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError, TableDamagedError
from streamhouse.storage_service.kafka.groups.coordinator import Coordinator, GroupKey, GroupLimits
from streamhouse.storage_service.kafka.groups.messages import Identity
from streamhouse.storage_service.kafka.groups.placement import coordinator_of
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards import ShardState

__all__ = ["GroupDesk", "code_for_members", "retriable_by_members"]

_T = TypeVar("_T")

_SHARDS_KNOWN_S: Final = 5.0
_KEEP_S: Final = 60.0
# What a member of any client looks for its coordinator anew and tries again after.
_AGAIN: Final = frozenset(
    (
        ErrorCode.kafka_storage_error,
        # A position may be committed twice.
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
    )
)


def retriable_by_members(code: ErrorCode) -> ErrorCode:
    """Return the code that members of groups understand where others repeat at `code`."""
    return ErrorCode.not_coordinator if code in _AGAIN else code


def code_for_members(error: StreamhouseError) -> ErrorCode:
    """Return the code of an error that members of groups understand.

    A damaged table stays so until somebody repairs it: it must not keep a group from its others.
    """
    code = error_code_of(error)
    return code if isinstance(error, TableDamagedError) else retriable_by_members(code)


class Asking(Protocol):
    """What a request of a member is to the desk."""

    @property
    def caller(self) -> Caller:
        """Whose group it is about."""

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises `ClientGone` if the client goes away meanwhile."""


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
        self._standing: dict[GroupKey, set[str]] = {}
        """Topics in which a group that has members has positions, as it calls them."""
        self._kept_s: dict[GroupKey, float] = {}
        self._keeping: dict[GroupKey, asyncio.Task[None]] = {}
        self.is_closed = False
        service.on_drain.append(self.close)

    def close(self) -> None:
        """End every wait; who asks again is told that this is no coordinator."""
        self.coordinator.end()
        self.is_closed = True
        self._look()

    async def settle(self) -> None:
        """Return when no table is being told of a group any more; after `close`."""
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    def key(self, exchange: Asking, group_id: str) -> GroupKey:
        """Return the caller's group of this id."""
        return exchange.caller.name, group_id

    # -- time ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Be woken when the coordinator wants to be; called after each call of it."""
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
        for key in self._standing.keys() - dict(self.coordinator.groups()).keys():
            del self._standing[key]
            self._kept_s.pop(key, None)
        self.look()

    async def wait(
        self,
        exchange: Asking,
        key: GroupKey,
        member_id: str,
        ask: Callable[[Callable[[_T], None]], None],
        *,
        on_answer: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """Return what a call of the coordinator is answered, now or later.

        `on_answer` is told it at once, while the caller may come to nothing yet. Raises
        `ClientGone` if the client closes its connection first: it is not there then.
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
                    given: Any = answered
                    self.coordinator.gave_up(key, member_id, given)
                    self.look()
        return answers[0]

    def lost(self, members: dict[GroupKey, str]) -> None:
        """Note that the connection is gone by which these members came."""
        for key, member_id in members.items():
            self.coordinator.lost(key, member_id)
        if members:
            self.look()

    def put_out(self, members: dict[GroupKey, str]) -> None:
        """Let members go that have joined by a connection whose token is none any more."""
        for key, member_id in members.items():
            self.coordinator.leave(key, [Identity(member_id=member_id)])
        members.clear()
        self.look()

    # -- which shard -----------------------------------------------------------------------------

    async def refusal(self, group_id: str) -> ErrorCode | None:
        """Return what is answered about a group that another shard coordinates."""
        shards = self._service.shards
        if shards is None or await self.shard_of(group_id) == shards.own:
            return None
        return ErrorCode.not_coordinator

    async def shard_of(self, group_id: str) -> str:
        """Return the shard that coordinates a group; of a service that has shards.

        Raises `StreamhouseError` if it is not known which shards there are.
        """
        shards = self._service.shards
        assert shards is not None
        live = {state.shard for state in await self._known_states() if state.is_live}
        return coordinator_of(group_id, live | {shards.own})

    async def _known_states(self) -> list[ShardState]:
        shards = self._service.shards
        assert shards is not None
        if self._loop.time() < self._states_until_s:
            return self._states
        if self._states:
            # The shards of a moment ago are as good a guess as any, for who asks meanwhile and if
            # nobody answers; none at all are not.
            self._states_until_s = self._loop.time() + _SHARDS_KNOWN_S
        try:
            self._states = await shards.states()
        except StreamhouseError:
            if not self._states:
                raise
        self._states_until_s = self._loop.time() + _SHARDS_KNOWN_S
        return self._states

    # -- positions -------------------------------------------------------------------------------

    def in_order(self, key: GroupKey) -> asyncio.Lock:
        """Return what a group's commits are held for: one after another, and seen by who asks.

        So a member of the next generation begins where the last commit of this one is.
        """
        return self._locks.setdefault(key, asyncio.Lock())

    def stands_in(self, key: GroupKey, topic: str) -> None:
        """Note that a group has positions in a topic: they are kept while it has members."""
        if self.coordinator.group(key) is not None:
            self._standing.setdefault(key, set()).add(topic)

    def due_to_keep(self, key: GroupKey) -> frozenset[str]:
        """Return the topics whose tables are to be told now that the group is still there."""
        now_s = self._loop.time()
        if key in self._keeping or key not in self._standing:
            return frozenset()
        if now_s < self._kept_s.get(key, now_s - _KEEP_S) + _KEEP_S:
            return frozenset()
        self._kept_s[key] = now_s
        return frozenset(self._standing[key])

    def keep(self, key: GroupKey, telling: Coroutine[Any, Any, None]) -> None:
        """Tell the tables of `due_to_keep`, while the group goes on."""
        self._keeping[key] = asyncio.ensure_future(telling)
        self._keeping[key].add_done_callback(lambda _: self._keeping.pop(key, None))
