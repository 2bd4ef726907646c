"""All consumer groups that a process coordinates: found, bounded, and woken when time is over.

Invariants:
- a group is one of the token that uses it: two tokens' groups of one name know nothing of each
  other, as their positions do not (`engine/consumers.py`)
- groups are in memory alone: after a restart members are unknown and join again, their positions
  are stored
- groups, members and the bytes of what they say are bounded; one token leaves room for others
Event loop only; the clock and the ids come from outside.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kio.schema.errors import ErrorCode

from streamhouse.core.model.values.consumer_names import (
    CONSUMER_NAME_RULE,
    is_consumer_name,
)
from streamhouse.storage_service.kafka.groups.group import Group, GroupState
from streamhouse.storage_service.kafka.groups.messages import (
    NO_GENERATION,
    Identity,
    JoinAnswer,
    JoinRequest,
    Leaving,
    OnJoined,
    OnSynced,
    SyncAnswer,
    SyncRequest,
)

__all__ = ["Coordinator", "GroupKey", "GroupLimits", "unusable_group_id"]

_logger = logging.getLogger(__name__)

SESSION_TIMEOUT_S_MIN: Final = 6.0
SESSION_TIMEOUT_S_MAX: Final = 1_800.0
# With less a generation could end before anybody has an answer, and the group begin the next one.
REBALANCE_TIMEOUT_S_MIN: Final = 1.0
REBALANCE_TIMEOUT_S_MAX: Final = 86_400.0
_INSTANCE_ID_CHARACTERS_MAX: Final = 249
# Clients have one for each assignor that they know. What all members have in common is looked for
# at each join.
_PROTOCOLS_MAX: Final = 20

GroupKey: TypeAlias = tuple[str, str]
"""The name of the token, and the group's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """How much is kept. `bytes_max` is of all members, what they said and were assigned.

    One owner has at most half of the groups and of the bytes. `initial_delay_s` is how long the
    first member of an empty group waits for others that start with it.
    """

    groups_max: int = 10_000
    members_max: int = 1_000
    bytes_max: int = 64 << 20
    initial_delay_s: float = 1.0


def unusable_group_id(group_id: str) -> str | None:
    """Return why no group can have this id, as a sentence; None if one can."""
    if is_consumer_name(group_id):
        return None
    return f"a consumer group is named by {CONSUMER_NAME_RULE}, not {group_id[:80]!r}"


class Coordinator:
    """The groups of one process."""

    def __init__(
        self,
        *,
        clock_s: Callable[[], float],
        new_id: Callable[[], str],
        limits: GroupLimits | None = None,
    ) -> None:
        """`clock_s` never goes back; `new_id` makes ids that nobody can guess."""
        self._clock_s = clock_s
        self._new_id = new_id
        self._limits = limits or GroupLimits()
        self._groups: dict[GroupKey, Group] = {}
        self._owners: dict[str, set[str]] = {}
        """By group id, who has a group of it."""
        self._sizes: dict[GroupKey, int] = {}
        self._held: dict[str, int] = {}
        self._wakes: list[tuple[float, int, GroupKey]] = []
        self._numbers = itertools.count()
        self._is_ended = False

    # -- time ------------------------------------------------------------------------------------

    def due_s(self) -> float:
        """Return when `tick` is to be called; infinite if nothing waits for time alone."""
        return self._wakes[0][0] if self._wakes else math.inf

    def tick(self) -> None:
        """Do what time alone brings to every group that is due."""
        now_s = self._clock_s()
        due = set()
        while self._wakes and self._wakes[0][0] <= now_s:
            due.add(heapq.heappop(self._wakes)[2])
        for key in due & self._groups.keys():
            with self._changed(key) as group:
                if group.due_s <= now_s:
                    group.tick(now_s)

    @contextmanager
    def _changed(self, key: GroupKey) -> Iterator[Group]:
        """Give a group that is about to change, and note afterwards what it holds and waits for."""
        group = self._groups[key]
        before = group.generation
        yield group
        owner, group_id = key
        if group.generation != before:
            _logger.info(
                "event=group_generation token_name=%s group=%s generation=%d members=%d",
                *(owner, group_id, group.generation, group.member_count()),
            )
        held = self._held.pop(owner, 0) - self._sizes.pop(key, 0)
        if group.is_unused() or group.state is GroupState.DEAD:
            del self._groups[key]
            self._owners[group_id].discard(owner)
            if not self._owners[group_id]:
                del self._owners[group_id]
        else:
            self._sizes[key] = group.size()
            held += self._sizes[key]
            if group.due_s < math.inf:
                self._wake(group.due_s, key)
        if held:
            self._held[owner] = held

    def _wake(self, due_s: float, key: GroupKey) -> None:
        """Look at the group then; most groups change often, so what is out of date is let go."""
        heapq.heappush(self._wakes, (due_s, next(self._numbers), key))
        if len(self._wakes) > 8 + 4 * len(self._groups):
            self._wakes = [
                (group.due_s, next(self._numbers), each)
                for each, group in self._groups.items()
                if group.due_s < math.inf
            ]
            heapq.heapify(self._wakes)

    # -- what members ask ------------------------------------------------------------------------

    def join(self, key: GroupKey, request: JoinRequest, on_joined: OnJoined) -> None:
        """Take a member into the group's next generation; answered when that begins."""
        error = self._join_refusal(key, request)
        if error is not None:
            on_joined(JoinAnswer(error=error, member_id=request.who.member_id))
            return
        timeout_s = max(request.rebalance_timeout_s, REBALANCE_TIMEOUT_S_MIN)
        request = replace(request, rebalance_timeout_s=min(timeout_s, REBALANCE_TIMEOUT_S_MAX))
        if key not in self._groups:
            self._owners.setdefault(key[1], set()).add(key[0])
            self._groups[key] = Group(
                members_max=self._limits.members_max,
                initial_delay_s=self._limits.initial_delay_s,
                new_id=self._new_id,
            )
        with self._changed(key) as group:
            group.join(request, on_joined, self._clock_s())

    def _join_refusal(self, key: GroupKey, request: JoinRequest) -> ErrorCode | None:
        owner, group_id = key
        if self._is_ended:
            return ErrorCode.not_coordinator
        if not is_consumer_name(group_id):
            return ErrorCode.invalid_group_id
        if not SESSION_TIMEOUT_S_MIN <= request.session_timeout_s <= SESSION_TIMEOUT_S_MAX:
            return ErrorCode.invalid_session_timeout
        if len(request.protocols) > _PROTOCOLS_MAX:
            return ErrorCode.invalid_request
        instance_id = request.who.instance_id
        if instance_id is not None and not 0 < len(instance_id) <= _INSTANCE_ID_CHARACTERS_MAX:
            return ErrorCode.invalid_request
        if key not in self._groups:
            if request.who.member_id:
                return ErrorCode.unknown_member_id
            if not self._has_room_for_group(owner):
                return ErrorCode.group_max_size_reached
        if not self._has_room(owner, request.size()):
            return ErrorCode.group_max_size_reached
        return None

    def _has_room_for_group(self, owner: str) -> bool:
        most = self._limits.groups_max
        if len(self._groups) >= most:
            return False
        # Counting is done while it may matter alone.
        if len(self._groups) < most // 2:
            return True
        return sum(other == owner for other, _ in self._groups) < most // 2

    def _has_room(self, owner: str, size: int) -> bool:
        most = self._limits.bytes_max
        own = self._held.get(owner, 0)
        return sum(self._held.values()) + size <= most and own + size <= most // 2

    def sync(self, key: GroupKey, request: SyncRequest, on_synced: OnSynced) -> None:
        """Answer a member with its assignment, once the group's leader has brought it."""
        if key not in self._groups:
            on_synced(SyncAnswer(error=self._of_no_group()))
        elif not self._has_room(key[0], request.size()):
            on_synced(SyncAnswer(error=ErrorCode.group_max_size_reached))
        else:
            with self._changed(key) as group:
                group.sync(request, on_synced, self._clock_s())

    def gave_up(self, key: GroupKey, member_id: str, answer: OnJoined | OnSynced) -> None:
        """Note that the connection is gone on which `answer` would have been given."""
        if key in self._groups:
            with self._changed(key) as group:
                group.gave_up(member_id, answer, self._clock_s())

    def lost(self, key: GroupKey, member_id: str) -> None:
        """Note that the connection is gone by which a member came, or was given its id."""
        if key in self._groups:
            with self._changed(key) as group:
                group.lost(member_id, self._clock_s())

    def heartbeat(self, key: GroupKey, who: Identity, generation: int) -> ErrorCode:
        """Note that a member is there; tell it if it is to join anew."""
        group = self._groups.get(key)
        if group is None:
            return self._of_no_group()
        return group.heartbeat(who, generation, self._clock_s())

    def leave(self, key: GroupKey, leaving: Iterable[Identity]) -> tuple[Leaving, ...]:
        """Let members go at once."""
        if key not in self._groups:
            error = self._of_no_group()
            return tuple(Leaving(who=who, error=error) for who in leaving)
        with self._changed(key) as group:
            return group.leave(leaving, self._clock_s())

    def check_commit(self, key: GroupKey, who: Identity, generation: int) -> ErrorCode:
        """Return whether positions are taken from this member now."""
        group = self._groups.get(key)
        if self._is_ended:
            return ErrorCode.not_coordinator
        if not is_consumer_name(key[1]):
            return ErrorCode.invalid_group_id
        if group is None:
            # Of a group that was before a restart: its member joins again.
            is_alone = generation <= NO_GENERATION
            return ErrorCode.none if is_alone else ErrorCode.illegal_generation
        return group.check_commit(who, generation, self._clock_s())

    def _of_no_group(self) -> ErrorCode:
        return ErrorCode.not_coordinator if self._is_ended else ErrorCode.unknown_member_id

    # -- what is asked about groups --------------------------------------------------------------

    def group(self, key: GroupKey) -> Group | None:
        """Return a group to look at; None if nobody is in it."""
        return self._groups.get(key)

    def groups_named(self, group_id: str) -> list[Group]:
        """Return the groups of this id, whosever they are."""
        return [self._groups[owner, group_id] for owner in sorted(self._owners.get(group_id, ()))]

    def groups(self) -> list[tuple[GroupKey, Group]]:
        """Return the groups that somebody is in."""
        return list(self._groups.items())

    def member_count(self) -> int:
        """Return how many members all groups have."""
        return sum(group.member_count() for group in self._groups.values())

    def end(self) -> None:
        """Answer all waits, now that another process coordinates; take nothing any more."""
        self._is_ended = True
        for group in self._groups.values():
            group.end(ErrorCode.not_coordinator)
        self._groups.clear()
        self._owners.clear()
        self._sizes.clear()
        self._held.clear()
        self._wakes.clear()
