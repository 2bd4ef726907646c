"""One consumer group: members, generation, and the answer to each call.

```text
 EMPTY -- first member --> PREPARING -- all have joined, or the time is over --> COMPLETING
   ^                        ^     |                                                  |
   '-- no members left -----|-----'          a member comes, goes, changes           |
                            |<-------------------------------------------------------|
                            |<--------------------------- STABLE <-- the leader's assignment
```

Invariants:
- a generation has a single leader, protocol and assignment: each member gets a part of the leader's
  assignment, possibly an empty part
- only members of the current generation commit, and no member between join and assignment
- every wait ends: with the next generation, the assignment, an error, or the member's removal
- after every call `due_s` is at or before the group's next deadline

Not thread-safe; `now_s` comes from one monotonic clock.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups._member import Member
from streamhouse.storage_service.kafka.groups.messages import (
    NO_GENERATION,
    Identity,
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    LeaveResult,
    OnJoined,
    OnSynced,
    SyncAnswer,
    SyncRequest,
)

__all__ = ["Group", "GroupState"]

_NAME_CHARACTERS_MAX: Final = 100
# The size of a reserved id of maximal length, with its expiry and the Python objects.
_RESERVED_ID_BYTES: Final = 400


class GroupState(enum.Enum):
    """Kafka's states; the values are Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Group:
    """The members of one group. A group without members and reserved ids can be dropped."""

    def __init__(
        self, *, members_max: int, initial_delay_s: float, new_id: Callable[[], str]
    ) -> None:
        """`new_id` returns unguessable ids that never repeat."""
        self.state = GroupState.EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.due_s = math.inf
        """When `tick` has to be called."""
        self._members_max = members_max
        self._initial_delay_s = initial_delay_s
        self._new_id = new_id
        self._members: dict[str, Member] = {}
        self._statics: dict[str, str] = {}
        self._offered: Counter[str] = Counter()
        """Protocol -> number of members; each join needs the protocols of all members."""
        self._reserved_ids: dict[str, float] = {}
        """Ids without a join yet -> expiry."""
        self._join_due_s = math.inf
        self._delay_left_s = 0.0
        self._is_first_delay = False
        self._has_newcomer = False
        self._sync_due_s = math.inf
        self._unsynced: set[str] = set()

    # -- views ------------------------------------------------------------------------------

    def is_unused(self) -> bool:
        """Return whether the group has neither members nor reserved ids."""
        return not self._members and not self._reserved_ids

    def size(self) -> int:
        """Return the memory of members and reserved ids in bytes."""
        of_members = sum(member.size() for member in self._members.values())
        return of_members + _RESERVED_ID_BYTES * len(self._reserved_ids)

    def member_count(self) -> int:
        """Return the number of members, including reserved ids."""
        return len(self._members) + len(self._reserved_ids)

    def members(self) -> tuple[JoinedMember, ...]:
        """Return the members, with metadata and assignments while the group is stable."""
        protocol = self.protocol or "" if self.state is GroupState.STABLE else ""
        return tuple(member.described(protocol) for member in self._members.values())

    # -- joining ---------------------------------------------------------------------------------

    def join(self, request: JoinRequest, on_joined: OnJoined, now_s: float) -> None:
        """Add a member to the next generation; the answer comes with the generation, or at once."""
        member_id, instance_id = request.identity.member_id, request.identity.instance_id
        if not self._supports(request):
            on_joined(_refused(request, ErrorCode.inconsistent_group_protocol))
        elif not member_id and instance_id is not None and instance_id in self._statics:
            self._replace_static(request, instance_id, on_joined, now_s)
        elif not member_id and self.member_count() >= self._members_max:
            on_joined(_refused(request, ErrorCode.group_max_size_reached))
        elif not member_id:
            self._join_new(request, on_joined, now_s)
        elif member_id in self._reserved_ids and instance_id is None:
            del self._reserved_ids[member_id]
            self._add(member_id, request, on_joined, now_s)
        elif (error := self._identity_error(request.identity)) is not None:
            on_joined(_refused(request, error))
        else:
            self._rejoin(self._members[member_id], request, on_joined, now_s)
        self._settle(now_s)

    def _supports(self, request: JoinRequest) -> bool:
        if not request.protocols or not request.protocol_type:
            return False
        if not self._members:
            return True
        is_of_type = request.protocol_type == self.protocol_type
        return is_of_type and not self._candidates().isdisjoint(request.protocols)

    def _candidates(self) -> set[str]:
        """Return the protocols that all members have; at least one, if there are members."""
        return {name for name, count in self._offered.items() if count == len(self._members)}

    def _best_protocol(self) -> str:
        """Return the protocol with most votes: each member votes for its favourite candidate."""
        candidates = self._candidates()
        votes = Counter(
            next(name for name in member.protocols if name in candidates)
            for member in self._members.values()
        )
        return votes.most_common(1)[0][0]

    def _join_new(self, request: JoinRequest, on_joined: OnJoined, now_s: float) -> None:
        name_prefix = request.identity.instance_id or request.client_id
        member_id = f"{name_prefix[:_NAME_CHARACTERS_MAX]}-{self._new_id()}"
        if request.identity.instance_id is None and request.requires_member_id:
            self._reserved_ids[member_id] = now_s + request.session_timeout_s
            on_joined(JoinAnswer(error=ErrorCode.member_id_required, member_id=member_id))
        else:
            self._add(member_id, request, on_joined, now_s)

    def _add(self, member_id: str, request: JoinRequest, on_joined: OnJoined, now_s: float) -> None:
        if not self._members:
            self.protocol_type = request.protocol_type
        member = self._members[member_id] = Member(member_id, request, now_s)
        self._offered.update(member.protocols.keys())
        if member.instance_id is not None:
            self._statics[member.instance_id] = member_id
        if self.leader is None:
            self.leader = member_id
        self._has_newcomer = True
        member.wait_for_join(on_joined)
        self._rebalance(now_s)

    def _rejoin(
        self, member: Member, request: JoinRequest, on_joined: OnJoined, now_s: float
    ) -> None:
        """Join a member again. Without a change, the answer is the current generation.

        A leader that rejoins a stable group requests a new assignment, for example for new
        partitions.
        """
        member.note_alive(now_s)
        is_same = member.is_same(request)
        is_leader = member.member_id == self.leader
        if is_same and (
            self.state is GroupState.COMPLETING
            or (self.state is GroupState.STABLE and not is_leader)
        ):
            on_joined(self._joined(member))
            return
        self._update(member, request)
        member.wait_for_join(on_joined)
        self._rebalance(now_s)

    def _update(self, member: Member, request: JoinRequest) -> None:
        self._offered.subtract(member.protocols.keys())
        member.update(request)
        self._offered.update(member.protocols.keys())
        self._offered = +self._offered

    def _replace_static(
        self, request: JoinRequest, instance_id: str, on_joined: OnJoined, now_s: float
    ) -> None:
        """Continue a restarted static member, which keeps its place and assignment.

        The holder of the old id is fenced. In a stable group nothing changes for other members.
        """
        old_id = self._statics[instance_id]
        member = self._members.pop(old_id)
        member.answer_join(JoinAnswer(error=ErrorCode.fenced_instance_id, member_id=old_id))
        member.answer_sync(SyncAnswer(error=ErrorCode.fenced_instance_id))
        member.member_id = f"{instance_id[:_NAME_CHARACTERS_MAX]}-{self._new_id()}"
        self._update(member, request)
        member.note_alive(now_s)
        self._members[member.member_id] = member
        self._statics[instance_id] = member.member_id
        is_leader = self.leader == old_id
        if is_leader:
            self.leader = member.member_id
        if old_id in self._unsynced:
            self._unsynced.remove(old_id)
            self._unsynced.add(member.member_id)
        if self.state is GroupState.STABLE and self._best_protocol() == self.protocol:
            # A client that cannot skip the assignment is told that another member leads.
            leader = old_id if is_leader and not request.can_skip else None
            on_joined(self._joined(member, leader=leader, is_assigned=is_leader and leader is None))
            return
        member.wait_for_join(on_joined)
        self._rebalance(now_s)

    def _joined(
        self, member: Member, *, leader: str | None = None, is_assigned: bool = False
    ) -> JoinAnswer:
        assert self.protocol is not None
        leads = leader is None and member.member_id == self.leader
        seen = (each.described(self.protocol) for each in self._members.values()) if leads else ()
        return JoinAnswer(
            member_id=member.member_id,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=leader or self.leader or "",
            is_assigned=is_assigned,
            members=tuple(seen),
        )

    # -- assignments -----------------------------------------------------------------------------

    def sync(self, request: SyncRequest, on_synced: OnSynced, now_s: float) -> None:
        """Answer a member with its assignment, after the leader has sent all assignments."""
        error = self._membership_error(request.identity, request.generation)
        if error is None and not self._is_agreed(request):
            error = ErrorCode.inconsistent_group_protocol
        if error is None and self.state is GroupState.PREPARING:
            error = ErrorCode.rebalance_in_progress
        if error is not None:
            on_synced(SyncAnswer(error=error))
            return
        member = self._members[request.identity.member_id]
        member.note_alive(now_s)
        self._unsynced.discard(member.member_id)
        if self.state is GroupState.STABLE:
            on_synced(self._synced(member))
        else:
            member.wait_for_sync(on_synced)
            if member.member_id == self.leader:
                self._assign(request, now_s)
        self._settle(now_s)

    def _is_agreed(self, request: SyncRequest) -> bool:
        return request.protocol_type in (None, self.protocol_type) and request.protocol in (
            None,
            self.protocol,
        )

    def _assign(self, request: SyncRequest, now_s: float) -> None:
        self.state = GroupState.STABLE
        for member in self._members.values():
            member.assignment = request.assignments.get(member.member_id, b"")
            if member.answer_sync(self._synced(member)):
                member.begin_session(now_s)

    def _synced(self, member: Member) -> SyncAnswer:
        return SyncAnswer(
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            assignment=member.assignment,
        )

    # -- signs of life -----------------------------------------------------------------------------

    def heartbeat(self, identity: Identity, generation: int, now_s: float) -> ErrorCode:
        """Record a sign of life; the answer tells the member whether to join again."""
        error = self._membership_error(identity, generation)
        if error is not None:
            return error
        self._members[identity.member_id].note_alive(now_s)
        if self.state is GroupState.PREPARING:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def check_commit(self, identity: Identity, generation: int, now_s: float) -> ErrorCode:
        """Return `none` if the member may commit positions now; the call is a sign of life.

        Clients without a membership may commit in an empty group. While the next generation forms,
        members of the current generation may still commit.
        """
        if generation <= NO_GENERATION and not self._members:
            return ErrorCode.none
        error = self._membership_error(identity, generation)
        if error is not None:
            return error
        self._members[identity.member_id].note_alive(now_s)
        if self.state is GroupState.COMPLETING:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def abandon_wait(self, member_id: str, answer: OnJoined | OnSynced, now_s: float) -> None:
        """Record that the connection of a member's pending answer is gone.

        A member that has joined counts as joined. Otherwise each crashed and returning client would
        keep all members waiting for a session. The membership lasts until the session ends; a
        member without any generation yet has nothing to lose, and is removed.
        """
        for member in tuple(self._waiting_for(member_id, answer)):
            if member.on_joined is not None and member.is_new and member.instance_id is None:
                self._remove(member, now_s)
            else:
                member.lose_wait(now_s)
        self._settle(now_s)

    def connection_lost(self, member_id: str, now_s: float) -> None:
        """Record that the connection of a member, or of a reserved id, is gone."""
        self._reserved_ids.pop(member_id, None)
        if member_id in self._members:
            self._members[member_id].lose(now_s)
        self._settle(now_s)

    def _waiting_for(self, member_id: str, answer: OnJoined | OnSynced) -> Iterator[Member]:
        # A new member does not know its id yet.
        named = self._members.get(member_id)
        for member in (named,) if named is not None else tuple(self._members.values()):
            if answer in (member.on_joined, member.on_synced):
                yield member

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self, leaving: Iterable[Identity], now_s: float) -> tuple[LeaveResult, ...]:
        """Remove members at once; an operator names a static member by its instance id alone."""
        results = tuple(
            LeaveResult(identity=identity, error=self._leave(identity, now_s))
            for identity in leaving
        )
        self._settle(now_s)
        return results

    def _leave(self, identity: Identity, now_s: float) -> ErrorCode:
        if identity.instance_id is not None and not identity.member_id:
            member_id = self._statics.get(identity.instance_id)
            if member_id is None:
                return ErrorCode.unknown_member_id
        elif (
            identity.instance_id is None
            and self._reserved_ids.pop(identity.member_id, None) is not None
        ):
            return ErrorCode.none
        elif (error := self._identity_error(identity)) is not None:
            return error
        else:
            member_id = identity.member_id
        self._remove(self._members[member_id], now_s)
        return ErrorCode.none

    def end(self, error: ErrorCode) -> None:
        """Answer all waits with `error`, and drop all members."""
        for member in tuple(self._members.values()):
            self._drop(member, error)
        self._reserved_ids.clear()
        self.state, self.due_s = GroupState.DEAD, math.inf

    def _identity_error(self, identity: Identity) -> ErrorCode | None:
        """Return the error if the identity is no member's; None for a member."""
        if identity.instance_id is not None:
            member_id = self._statics.get(identity.instance_id)
            if member_id is not None and member_id != identity.member_id:
                return ErrorCode.fenced_instance_id
            if member_id is None:
                return ErrorCode.unknown_member_id
        return None if identity.member_id in self._members else ErrorCode.unknown_member_id

    def _membership_error(self, identity: Identity, generation: int) -> ErrorCode | None:
        error = self._identity_error(identity)
        if error is None and generation != self.generation:
            return ErrorCode.illegal_generation
        return error

    # -- from one generation to the next ---------------------------------------------------------

    def _rebalance(self, now_s: float) -> None:
        """Ask all members to join again, unless that is in progress."""
        if self.state is GroupState.PREPARING:
            if self._join_due_s == math.inf:
                # The first join of this generation starts the timeout.
                self._join_due_s = now_s + self._rebalance_timeout_s()
            return
        for member in self._members.values():
            if member.answer_sync(SyncAnswer(error=ErrorCode.rebalance_in_progress)):
                member.begin_session(now_s)
        self._unsynced.clear()
        self._sync_due_s = math.inf
        timeout_s = self._rebalance_timeout_s()
        # The processes of one application start together, and should get one generation.
        self._is_first_delay = self.state is GroupState.EMPTY and self._initial_delay_s > 0
        if self._is_first_delay:
            delay_s = min(self._initial_delay_s, timeout_s)
            self._join_due_s, self._delay_left_s = now_s + delay_s, timeout_s - delay_s
            self._has_newcomer = False
        else:
            self._join_due_s = now_s + timeout_s
        self.state = GroupState.PREPARING

    def _rebalance_timeout_s(self) -> float:
        return max((m.rebalance_timeout_s for m in self._members.values()), default=0.0)

    def _have_all_joined(self) -> bool:
        if self._is_first_delay or self._reserved_ids:
            return False
        return all(member.on_joined is not None for member in self._members.values())

    def _complete_join(self, now_s: float) -> None:
        """Begin the next generation with the members that have joined.

        A static member without a join stays a member until its session ends: its process may be
        restarting.
        """
        for member in tuple(self._members.values()):
            if member.on_joined is None and member.instance_id is None:
                self._drop(member, ErrorCode.unknown_member_id)
        joined = [m for m in self._members.values() if m.on_joined is not None]
        self._is_first_delay, self._join_due_s = False, math.inf
        if self._members and not joined:
            # All members may be restarting. The group becomes empty when their sessions end.
            return
        self.generation += 1
        if not joined:
            self.state, self.protocol, self.protocol_type = GroupState.EMPTY, None, None
            return
        # A leader without a connection would assign nothing, and keep the other members waiting.
        able = [member for member in joined if not member.is_lost] or joined
        if all(member.member_id != self.leader for member in able):
            self.leader = able[0].member_id
        self.state, self.protocol = GroupState.COMPLETING, self._best_protocol()
        for member in self._members.values():
            member.assignment = b""
        self._sync_due_s = now_s + self._rebalance_timeout_s()
        self._unsynced = {member.member_id for member in joined}
        for member in joined:
            member.is_new = False
            member.begin_session(now_s)
            member.answer_join(self._joined(member))

    def _remove(self, member: Member, now_s: float) -> None:
        """Remove a member; the other members share its partitions."""
        self._drop(member, ErrorCode.unknown_member_id)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING):
            self._rebalance(now_s)

    def _drop(self, member: Member, error: ErrorCode) -> None:
        member.answer_join(JoinAnswer(error=error))
        member.answer_sync(SyncAnswer(error=error))
        del self._members[member.member_id]
        self._offered.subtract(member.protocols.keys())
        self._offered = +self._offered
        self._unsynced.discard(member.member_id)
        if member.instance_id is not None:
            del self._statics[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self._members), None)

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Apply deadlines: ended sessions, and joins or syncs that took too long."""
        for member_id, due_s in tuple(self._reserved_ids.items()):
            if due_s <= now_s:
                del self._reserved_ids[member_id]
        for member in tuple(self._members.values()):
            if self._due_s(member) <= now_s:
                self._remove(member, now_s)
        if self._sync_due_s <= now_s:
            # This removes a leader without an assignment too, which would keep the other members
            # waiting for ever.
            for member_id in tuple(self._unsynced):
                self._remove(self._members[member_id], now_s)
        if self.state is GroupState.PREPARING and self._join_due_s <= now_s:
            if self._is_first_delay and self._has_newcomer and self._delay_left_s > 0:
                delay_s = min(self._initial_delay_s, self._delay_left_s)
                self._join_due_s, self._delay_left_s = now_s + delay_s, self._delay_left_s - delay_s
                self._has_newcomer = False
            else:
                self._complete_join(now_s)
        self._settle(now_s)

    def _due_s(self, member: Member) -> float:
        is_completing = self.state is GroupState.COMPLETING
        is_late = is_completing and member.member_id in self._unsynced
        return member.due_s(is_waited_for=is_late or self.state is GroupState.PREPARING)

    def _settle(self, now_s: float) -> None:
        """Begin the next generation if all members have joined, and find the next deadline."""
        if self.state is GroupState.PREPARING and (not self._members or self._have_all_joined()):
            self._complete_join(now_s)
        if not self._unsynced:
            self._sync_due_s = math.inf
        self.due_s = min(
            (
                self._join_due_s if self.state is GroupState.PREPARING else math.inf,
                self._sync_due_s,
                *self._reserved_ids.values(),
                *(self._due_s(member) for member in self._members.values()),
            )
        )


def _refused(request: JoinRequest, error: ErrorCode) -> JoinAnswer:
    return JoinAnswer(error=error, member_id=request.identity.member_id)
