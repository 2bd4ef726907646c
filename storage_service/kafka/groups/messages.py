"""What members of a consumer group ask, and what they are answered: values without a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kio.schema.errors import ErrorCode

__all__ = [
    "NO_GENERATION",
    "Identity",
    "JoinAnswer",
    "JoinRequest",
    "JoinedMember",
    "Leaving",
    "OnJoined",
    "OnSynced",
    "SyncAnswer",
    "SyncRequest",
]

# What Python's objects take around the bytes of a name and of what is said under it.
_PROTOCOL_BYTES: Final = 200

NO_GENERATION = -1
"""The generation of who is in no group: it only keeps its positions here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a member says it is: `instance_id` only of a static member (KIP-345)."""

    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A member wants to be part of the next generation; `member_id` is "" before it has one.

    `protocols` are names of ways to assign partitions, best first, with what the member says to
    the leader under each. With `requires_member_id` a new member gets an id first and joins with
    it (KIP-394). With `can_skip` a leader can be told to assign nothing (KIP-814).
    """

    who: Identity
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: Mapping[str, bytes]
    requires_member_id: bool = True
    can_skip: bool = True

    def size(self) -> int:
        """Return how many bytes of it are kept."""
        named = sum(
            _PROTOCOL_BYTES + len(name) + len(metadata) for name, metadata in self.protocols.items()
        )
        texts = (self.client_id, self.client_host, self.protocol_type, self.who.instance_id or "")
        return named + sum(map(len, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMember:
    """A member as its group's leader, or who describes the group, sees it."""

    who: Identity
    metadata: bytes
    client_id: str = ""
    client_host: str = ""
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """What a member is told of the generation it is in; `members` only if it leads."""

    error: ErrorCode = ErrorCode.none
    member_id: str = ""
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    is_assigned: bool = False
    """The leader is to assign nothing: its group has its assignment."""
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """A member wants its assignment; `assignments` by member id are the leader's.

    `protocol_type` and `protocol` are None from clients that do not say them (KIP-559).
    """

    who: Identity
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = field(default_factory=dict)

    def size(self) -> int:
        """Return how many bytes of it are kept."""
        return sum(len(name) + len(value) for name, value in self.assignments.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    """A member's assignment, in the leader's bytes."""

    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """One that leaves, and whether it could."""

    who: Identity
    error: ErrorCode


OnJoined: TypeAlias = Callable[[JoinAnswer], None]
"""Called once, when a join is answered: now or later."""
OnSynced: TypeAlias = Callable[[SyncAnswer], None]
"""Called once, when a sync is answered: now or later."""
