"""Requests of group members and their answers: values without an API version."""

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
    "LeaveResult",
    "OnJoined",
    "OnSynced",
    "SyncAnswer",
    "SyncRequest",
]

# The size of the Python objects around a protocol's name and metadata.
_PROTOCOL_BYTES: Final = 200

NO_GENERATION = -1
"""The generation of clients without a membership, which only store positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The ids that a member sends; `instance_id` only of a static member (KIP-345)."""

    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A request to join the next generation; `member_id` is "" before the member has an id.

    `protocols` are names of assignment strategies, best first, with the member's metadata for the
    leader. With `requires_member_id` a new member gets an id first, and joins with the id
    (KIP-394). With `can_skip` a leader understands an answer that needs no new assignment
    (KIP-814).
    """

    identity: Identity
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: Mapping[str, bytes]
    requires_member_id: bool = True
    can_skip: bool = True

    def size(self) -> int:
        """Return the memory of the request in bytes."""
        protocol_bytes = sum(
            _PROTOCOL_BYTES + len(name) + len(metadata) for name, metadata in self.protocols.items()
        )
        texts = (
            self.client_id,
            self.client_host,
            self.protocol_type,
            self.identity.instance_id or "",
        )
        return protocol_bytes + sum(map(len, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMember:
    """A member, as the group's leader or a description of the group shows the member."""

    identity: Identity
    metadata: bytes
    client_id: str = ""
    client_host: str = ""
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """The generation that a member has joined; `members` only for the leader."""

    error: ErrorCode = ErrorCode.none
    member_id: str = ""
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    is_assigned: bool = False
    """The group has its assignment already, so the leader assigns nothing."""
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """A member requests its assignment; the leader brings `assignments` by member id.

    `protocol_type` and `protocol` are None for clients that do not send these fields (KIP-559).
    """

    identity: Identity
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = field(default_factory=dict)

    def size(self) -> int:
        """Return the memory of the request in bytes."""
        return sum(len(name) + len(value) for name, value in self.assignments.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    """A member's assignment, in the leader's encoding."""

    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveResult:
    """A leaving member, and the result."""

    identity: Identity
    error: ErrorCode


OnJoined: TypeAlias = Callable[[JoinAnswer], None]
"""Called once, when a join is answered: now or later."""
OnSynced: TypeAlias = Callable[[SyncAnswer], None]
"""Called once, when a sync is answered: now or later."""
