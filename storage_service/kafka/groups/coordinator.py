"""All consumer groups that a process coordinates, with limits and timers.

Invariants:
- a group belongs to a token: groups of two tokens with one name are separate, and so are their
  positions (`engine/consumers.py`)
- groups are in memory only: after a restart members join again, and positions are stored elsewhere
- groups, members and their bytes are bounded; a token leaves room for other tokens

Event loop only; the caller supplies the clock and the ids.
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
    LeaveResult,
    OnJoined,
    OnSynced,
    SyncAnswer,
    SyncRequest,
)

__all__ = ["Coordinator", "GroupKey", "GroupLimits", "unusable_group_id"]

_logger = logging.getLogger(__name__)

SESSION_TIMEOUT_S_MIN: Final = 6.0
SESSION_TIMEOUT_S_MAX: Final = 1_800.0
# With a shorter timeout a generation could end before its members get an answer.
REBALANCE_TIMEOUT_S_MIN: Final = 1.0
REBALANCE_TIMEOUT_S_MAX: Final = 86_400.0
_INSTANCE_ID_CHARACTERS_MAX: Final = 249
# Clients send one protocol for each of their assignors. Every join intersects the protocols of all
# members.
_PROTOCOLS_MAX: Final = 20

GroupKey: TypeAlias = tuple[str, str]
"""The name of the token, and the group id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The limits of all groups. `bytes_max` covers all members' metadata and assignments.

    One owner has at most half of the groups and of the bytes. `initial_delay_s` is how long an
    empty group waits after its first member, for members that start at the same time.
    """

    groups_max: int = 10_000
    members_max: int = 1_000
    bytes_max: int = 64 << 20
    initial_delay_s: float = 1.0


def unusable_group_id(group_id: str) -> str | None:
    """Return why a group id is invalid, as a sentence; None for a valid id."""
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
        """`clock_s` is monotonic; `new_id` returns unguessable ids."""
        self._clock_s = clock_s
        self._new_id = new_id
        self._limits = limits or GroupLimits()
        self._groups: dict[GroupKey, Group] = {}
        self._owners: dict[str, set[str]] = {}
        """Group id -> owners of a group with this id."""
        self._sizes: dict[GroupKey, int] = {}
        self._owner_bytes: dict[str, int] = {}
        self._wakes: list[tuple[float, int, GroupKey]] = []
        self._numbers = itertools.count()
        self._is_ended = False

    # -- time ------------------------------------------------------------------------------------

    def due_s(self) -> float:
        """Return when `tick` has to be called; infinite without any deadline."""
        return self._wakes[0][0] if self._wakes else math.inf

    def tick(self) -> None:
        """Apply the deadlines that have passed."""
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
        """Yield a group for a change, and afterwards update the group's size and deadline."""
        group = self._groups[key]
        old_generation = group.generation
        yield group
        owner, group_id = key
        if group.generation != old_generation:
            _logger.info(
                "event=group_generation token_name=%s group=%s generation=%d members=%d",
                *(owner, group_id, group.generation, group.member_count()),
            )
        owner_bytes = self._owner_bytes.pop(owner, 0) - self._sizes.pop(key, 0)
        if group.is_unused() or group.state is GroupState.DEAD:
            del self._groups[key]
            self._owners[group_id].discard(owner)
            if not self._owners[group_id]:
                del self._owners[group_id]
        else:
            self._sizes[key] = group.size()
            owner_bytes += self._sizes[key]
            if group.due_s < math.inf:
                self._wake(group.due_s, key)
        if owner_bytes:
            self._owner_bytes[owner] = owner_bytes

    def _wake(self, due_s: float, key: GroupKey) -> None:
        """Schedule a look at the group; outdated entries are dropped from time to time."""
        heapq.heappush(self._wakes, (due_s, next(self._numbers), key))
        if len(self._wakes) > 8 + 4 * len(self._groups):
            self._wakes = [
                (group.due_s, next(self._numbers), each)
                for each, group in self._groups.items()
                if group.due_s < math.inf
            ]
            heapq.heapify(self._wakes)

    # -- requests of members
    # ------------------------------------------------------------------------

    def join(self, key: GroupKey, request: JoinRequest, on_joined: OnJoined) -> None:
        """Add a member to the group's next generation; the answer waits for the generation."""
        error = self._join_refusal(key, request)
        if error is not None:
            on_joined(JoinAnswer(error=error, member_id=request.identity.member_id))
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
        instance_id = request.identity.instance_id
        if instance_id is not None and not 0 < len(instance_id) <= _INSTANCE_ID_CHARACTERS_MAX:
            return ErrorCode.invalid_request
        if key not in self._groups:
            if request.identity.member_id:
                return ErrorCode.unknown_member_id
            if not self._has_room_for_group(owner):
                return ErrorCode.group_max_size_reached
        if not self._has_room(owner, request.size()):
            return ErrorCode.group_max_size_reached
        return None

    def _has_room_for_group(self, owner: str) -> bool:
        groups_max = self._limits.groups_max
        if len(self._groups) >= groups_max:
            return False
        # Count the owner's groups only if the limit may be reached.
        if len(self._groups) < groups_max // 2:
            return True
        return sum(group_owner == owner for group_owner, _ in self._groups) < groups_max // 2

    def _has_room(self, owner: str, size: int) -> bool:
        bytes_max = self._limits.bytes_max
        owner_bytes = self._owner_bytes.get(owner, 0)
        return (
            sum(self._owner_bytes.values()) + size <= bytes_max
            and owner_bytes + size <= bytes_max // 2
        )

    def sync(self, key: GroupKey, request: SyncRequest, on_synced: OnSynced) -> None:
        """Answer a member with its assignment, after the leader has sent all assignments."""
        if key not in self._groups:
            on_synced(SyncAnswer(error=self._no_group_error()))
        elif not self._has_room(key[0], request.size()):
            on_synced(SyncAnswer(error=ErrorCode.group_max_size_reached))
        else:
            with self._changed(key) as group:
                group.sync(request, on_synced, self._clock_s())

    def abandon_wait(self, key: GroupKey, member_id: str, answer: OnJoined | OnSynced) -> None:
        """Record that the connection of a pending `answer` is gone."""
        if key in self._groups:
            with self._changed(key) as group:
                group.abandon_wait(member_id, answer, self._clock_s())

    def connection_lost(self, key: GroupKey, member_id: str) -> None:
        """Record that the connection of a member, or of a reserved id, is gone."""
        if key in self._groups:
            with self._changed(key) as group:
                group.connection_lost(member_id, self._clock_s())

    def heartbeat(self, key: GroupKey, identity: Identity, generation: int) -> ErrorCode:
        """Record a sign of life; the answer tells the member whether to join again."""
        group = self._groups.get(key)
        if group is None:
            return self._no_group_error()
        return group.heartbeat(identity, generation, self._clock_s())

    def leave(self, key: GroupKey, leaving: Iterable[Identity]) -> tuple[LeaveResult, ...]:
        """Remove members at once."""
        if key not in self._groups:
            error = self._no_group_error()
            return tuple(LeaveResult(identity=identity, error=error) for identity in leaving)
        with self._changed(key) as group:
            return group.leave(leaving, self._clock_s())

    def check_commit(self, key: GroupKey, identity: Identity, generation: int) -> ErrorCode:
        """Return `none` if the member may commit positions now, else the error code."""
        group = self._groups.get(key)
        if self._is_ended:
            return ErrorCode.not_coordinator
        if not is_consumer_name(key[1]):
            return ErrorCode.invalid_group_id
        if group is None:
            # After a restart the group is unknown; the member joins again.
            is_alone = generation <= NO_GENERATION
            return ErrorCode.none if is_alone else ErrorCode.illegal_generation
        return group.check_commit(identity, generation, self._clock_s())

    def _no_group_error(self) -> ErrorCode:
        return ErrorCode.not_coordinator if self._is_ended else ErrorCode.unknown_member_id

    # -- views of groups --------------------------------------------------------------

    def group(self, key: GroupKey) -> Group | None:
        """Return a group to look at; None for a group without members."""
        return self._groups.get(key)

    def groups_named(self, group_id: str) -> list[Group]:
        """Return the groups of this id, of all owners."""
        return [self._groups[owner, group_id] for owner in sorted(self._owners.get(group_id, ()))]

    def groups(self) -> list[tuple[GroupKey, Group]]:
        """Return the groups with members."""
        return list(self._groups.items())

    def member_count(self) -> int:
        """Return the number of members in all groups."""
        return sum(group.member_count() for group in self._groups.values())

    def end(self) -> None:
        """Answer all waits because another process coordinates now, and refuse further calls."""
        self._is_ended = True
        for group in self._groups.values():
            group.end(ErrorCode.not_coordinator)
        self._groups.clear()
        self._owners.clear()
        self._sizes.clear()
        self._owner_bytes.clear()
        self._wakes.clear()
