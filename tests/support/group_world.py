"""A coordinator of consumer groups with a clock that a test moves, and the members that call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.coordinator import Coordinator, GroupKey, GroupLimits
from streamhouse.storage_service.kafka.groups.group import Group
from streamhouse.storage_service.kafka.groups.messages import (
    Identity,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    SyncRequest,
)

__all__ = ["KEY", "SESSION_S", "Answers", "GroupWorld"]

KEY: GroupKey = ("me", "billing")
SESSION_S = 10.0
REBALANCE_S = 60.0


class Answers(list[Any]):
    """What a call was answered, at most once."""

    def __call__(self, answer: JoinAnswer | SyncAnswer) -> None:
        assert not self, f"answered twice: {self[0]}, then {answer}"
        self.append(answer)

    # Two waits are two, also while both have no answer.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    @property
    def error(self) -> ErrorCode:
        """The code of the answer that there must be."""
        (answer,) = self
        return ErrorCode(answer.error)


class GroupWorld:
    """One coordinator."""

    def __init__(self, *, initial_delay_s: float = 0.0, **limits: Any) -> None:
        self.now_s = 1_000.0
        self._ids = 0
        self.coordinator = Coordinator(
            clock_s=lambda: self.now_s,
            new_id=self._new_id,
            limits=GroupLimits(initial_delay_s=initial_delay_s, **limits),
        )

    def _new_id(self) -> str:
        self._ids += 1
        return str(self._ids)

    def pass_time(self, seconds: float) -> None:
        """Let time go by; the coordinator is woken when it wants to be."""
        end_s = self.now_s + seconds
        while self.coordinator.due_s() <= end_s:
            self.now_s = max(self.now_s, self.coordinator.due_s())
            self.coordinator.tick()
        self.now_s = end_s

    def group(self, key: GroupKey = KEY) -> Group:
        """Return the group, which somebody must be in."""
        group = self.coordinator.group(key)
        assert group is not None
        return group

    def ask_to_join(
        self,
        member_id: str = "",
        *,
        key: GroupKey = KEY,
        instance_id: str | None = None,
        protocols: Mapping[str, bytes] | None = None,
        **other: Any,
    ) -> Answers:
        """Send a JoinGroup; the answer may come later."""
        given: dict[str, Any] = {
            "client_id": "app",
            "client_host": "/127.0.0.1",
            "session_timeout_s": SESSION_S,
            "rebalance_timeout_s": REBALANCE_S,
            "protocol_type": "consumer",
        }
        request = JoinRequest(
            identity=Identity(member_id=member_id, instance_id=instance_id),
            protocols={"range": b"t"} if protocols is None else protocols,
            **(given | other),
        )
        answers = Answers()
        self.coordinator.join(key, request, answers)
        return answers

    def come(self, *, key: GroupKey = KEY, **other: Any) -> tuple[str, Answers]:
        """Get an id and join with it; return the id and the answer to come."""
        first = self.ask_to_join(key=key, **other)
        assert first.error is ErrorCode.member_id_required
        return first[0].member_id, self.ask_to_join(first[0].member_id, key=key, **other)

    def sync(
        self,
        joined: JoinAnswer,
        assignments: Mapping[str, bytes] | None = None,
        *,
        key: GroupKey = KEY,
        instance_id: str | None = None,
        **other: Any,
    ) -> Answers:
        """Send the SyncGroup that follows a JoinGroup."""
        request = SyncRequest(
            identity=Identity(member_id=joined.member_id, instance_id=instance_id),
            generation=joined.generation,
            assignments=assignments or {},
            **other,
        )
        answers = Answers()
        self.coordinator.sync(key, request, answers)
        return answers

    def assign(self, *joined: JoinAnswer) -> dict[str, bytes]:
        """Let all these sync, the leader last; return what each got, by member id."""
        (leader,) = (one for one in joined if one.leader == one.member_id)
        wanted = {
            m.identity.member_id: f"for {m.identity.member_id}".encode() for m in leader.members
        }
        waits = {one.member_id: self.sync(one) for one in joined if one is not leader}
        waits[leader.member_id] = self.sync(leader, wanted)
        assert all(wait.error is ErrorCode.none for wait in waits.values())
        return {member_id: wait[0].assignment for member_id, wait in waits.items()}

    def stable(self, count: int, **other: Any) -> list[JoinAnswer]:
        """Make a stable group of so many members; return what each was told, the leader first."""
        waits = [self.come(**other)[1] for _ in range(count)]
        if count > 1:
            # The first was alone in a generation of its own; it joins again with the others.
            first = waits[0][0]
            waits[0] = self.ask_to_join(first.member_id, **other)
        joined: list[JoinAnswer] = [wait[0] for wait in waits]
        self.assign(*joined)
        return joined

    def heartbeat(self, joined: JoinAnswer, *, key: GroupKey = KEY, **other: Any) -> ErrorCode:
        """Send a heartbeat."""
        identity = Identity(member_id=joined.member_id, **other)
        return self.coordinator.heartbeat(key, identity, joined.generation)

    def commit(self, member_id: str, generation: int, *, key: GroupKey = KEY) -> ErrorCode:
        """Ask whether positions are taken."""
        return self.coordinator.check_commit(key, Identity(member_id=member_id), generation)

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        """Send a LeaveGroup of one member."""
        identity = Identity(member_id=member_id, instance_id=instance_id)
        (gone,) = self.coordinator.leave(KEY, [identity])
        return gone.error
