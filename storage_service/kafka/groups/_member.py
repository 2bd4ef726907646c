"""One member of a consumer group: protocols, the pending answer, and the session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.messages import (
    Identity,
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    OnJoined,
    OnSynced,
    SyncAnswer,
)

__all__ = ["Member"]

# The size of the Python objects, without the texts.
_MEMBER_BYTES: Final = 1_000
# The minimal number of heartbeats in a session, as Kafka advises clients.
_HEARTBEATS: Final = 3
_NEW_MEMBER_WAITS_S: Final = 300.0
"""How long a new member waits for its first generation; a new attempt loses nothing."""


class Member:
    """A member with an id. The group decides; `Member` remembers, and answers each wait once."""

    def __init__(self, member_id: str, request: JoinRequest, now_s: float) -> None:
        self.member_id = member_id
        self.instance_id = request.identity.instance_id
        self.client_id = request.client_id
        self.client_host = request.client_host
        self.assignment = b""
        self.is_new = True
        """Whether no generation was announced to the member yet."""
        self.on_joined: OnJoined | None = None
        self.on_synced: OnSynced | None = None
        self._heard_s = now_s
        self._lost_s: float | None = None
        self._take(request)

    def _take(self, request: JoinRequest) -> None:
        self.session_timeout_s = request.session_timeout_s
        self.rebalance_timeout_s = request.rebalance_timeout_s
        self.protocols: Mapping[str, bytes] = dict(request.protocols)
        self._request_size = request.size()

    def update(self, request: JoinRequest) -> None:
        """Replace the member's settings by those of a new request."""
        self._take(request)
        self.client_id, self.client_host = request.client_id, request.client_host

    def size(self) -> int:
        """Return the memory of the member in bytes."""
        return _MEMBER_BYTES + self._request_size + len(self.member_id) + len(self.assignment)

    def identity(self) -> Identity:
        """Return the member's ids."""
        return Identity(member_id=self.member_id, instance_id=self.instance_id)

    def is_same(self, request: JoinRequest) -> bool:
        """Return whether the request has the same protocols, in the same order."""
        return list(self.protocols.items()) == list(request.protocols.items())

    def described(self, protocol: str) -> JoinedMember:
        """Return the leader's view of the member under a protocol; "" hides the metadata."""
        return JoinedMember(
            identity=self.identity(),
            metadata=self.protocols.get(protocol, b""),
            client_id=self.client_id,
            client_host=self.client_host,
            assignment=self.assignment if protocol else b"",
        )

    # -- the session ---------------------------------------------------------------

    def note_alive(self, now_s: float) -> None:
        """Record a sign of life."""
        self._heard_s, self._lost_s = now_s, None

    def begin_session(self, now_s: float) -> None:
        """Begin a new session, after an answer to the member."""
        self._heard_s = now_s

    def lose(self, now_s: float) -> None:
        """Record that the connection is gone; the member may return by another connection."""
        self._lost_s = now_s

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone, without a return by another connection."""
        return self._lost_s is not None

    def due_s(self, *, is_waited_for: bool) -> float:
        """Return when the member expires without a sign of life.

        A member that waits for an answer cannot send heartbeats. Such a wait ends with the group's
        own deadlines. A new member's wait has a limit of its own: the client may have gone, and may
        join again as another member.

        If other members wait for this member (`is_waited_for`), a member without a connection
        expires after the time between heartbeats. A static member keeps its whole session for a
        restart.
        """
        if self.on_joined is not None:
            return self._heard_s + _NEW_MEMBER_WAITS_S if self.is_new else math.inf
        if self.on_synced is not None:
            return math.inf
        due_s = self._heard_s + self.session_timeout_s
        if is_waited_for and self._lost_s is not None and self.instance_id is None:
            due_s = min(due_s, self._lost_s + self.session_timeout_s / _HEARTBEATS)
        return due_s

    def lose_wait(self, now_s: float) -> None:
        """Record that the connection of a pending answer is gone; a join stays valid."""
        self.lose(now_s)
        if self.on_joined is not None:
            self.on_joined = _unheard
        if self.on_synced is not None:
            self.on_synced = None
            self.begin_session(now_s)

    # -- pending answers -----------------------------------------------------------------------

    def wait_for_join(self, on_joined: OnJoined) -> None:
        """Wait for the next generation; an earlier wait ends, because its connection is gone."""
        self.answer_join(
            JoinAnswer(error=ErrorCode.rebalance_in_progress, member_id=self.member_id)
        )
        self.on_joined = on_joined

    def wait_for_sync(self, on_synced: OnSynced) -> None:
        """Wait for the assignment; an earlier wait ends, because its connection is gone."""
        self.answer_sync(SyncAnswer(error=ErrorCode.rebalance_in_progress))
        self.on_synced = on_synced

    def answer_join(self, answer: JoinAnswer) -> bool:
        """End the wait for a generation; False without such a wait."""
        on_joined, self.on_joined = self.on_joined, None
        if on_joined is None:
            return False
        on_joined(answer)
        return True

    def answer_sync(self, answer: SyncAnswer) -> bool:
        """End the wait for the assignment; False without such a wait."""
        on_synced, self.on_synced = self.on_synced, None
        if on_synced is None:
            return False
        on_synced(answer)
        return True


def _unheard(_: JoinAnswer) -> None:
    """Drop the answer."""
