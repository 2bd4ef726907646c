"""One member of a consumer group: what it can do, what it waits for, until when it is believed."""

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

# What Python's objects take beside the texts.
_MEMBER_BYTES: Final = 1_000
# In a session, as clients are told to have at least.
_HEARTBEATS: Final = 3
_NEW_MEMBER_WAITS_S: Final = 300.0
"""A new member waits so long for its first generation: it has nothing to lose by asking again."""


class Member:
    """A member that has an id. The group decides; this remembers, and answers each wait once."""

    def __init__(self, member_id: str, request: JoinRequest, now_s: float) -> None:
        self.member_id = member_id
        self.instance_id = request.who.instance_id
        self.client_id = request.client_id
        self.client_host = request.client_host
        self.assignment = b""
        self.is_new = True
        """It has not been told of a generation yet."""
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
        """Take what it says anew."""
        self._take(request)
        self.client_id, self.client_host = request.client_id, request.client_host

    def size(self) -> int:
        """Return how many bytes are kept for it."""
        return _MEMBER_BYTES + self._request_size + len(self.member_id) + len(self.assignment)

    def identity(self) -> Identity:
        """Return who it is."""
        return Identity(member_id=self.member_id, instance_id=self.instance_id)

    def is_same(self, request: JoinRequest) -> bool:
        """Whether it said the same before, in the same order."""
        return list(self.protocols.items()) == list(request.protocols.items())

    def seen_under(self, protocol: str) -> JoinedMember:
        """Return it as the leader sees it under a protocol, "" without what it said."""
        return JoinedMember(
            who=self.identity(),
            metadata=self.protocols.get(protocol, b""),
            client_id=self.client_id,
            client_host=self.client_host,
            assignment=self.assignment if protocol else b"",
        )

    # -- until when it is believed ---------------------------------------------------------------

    def hear(self, now_s: float) -> None:
        """Note that it is there."""
        self._heard_s, self._lost_s = now_s, None

    def begin_session(self, now_s: float) -> None:
        """Give it a session from now on to be heard of: it was answered, or was to be."""
        self._heard_s = now_s

    def lose(self, now_s: float) -> None:
        """Note that its connection is gone; it may come back by another one."""
        self._lost_s = now_s

    @property
    def is_lost(self) -> bool:
        """Whether its connection is gone, and it has not come back by another one."""
        return self._lost_s is not None

    def due_s(self, *, is_waited_for: bool) -> float:
        """Return when it is given up unless it is heard of.

        Who waits for an answer cannot be heard of. A wait ends with the group's own deadlines, a
        new member's after a time of its own: it may have gone, and join again as yet another.

        While others cannot go on without it (`is_waited_for`), one whose connection is gone has as
        long as heartbeats may be apart. A static member has its whole session to start anew.
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
        """Note that nobody hears the answer that it waits for: that it has joined stays so."""
        self.lose(now_s)
        if self.on_joined is not None:
            self.on_joined = _unheard
        if self.on_synced is not None:
            self.on_synced = None
            self.begin_session(now_s)

    # -- what it waits for -----------------------------------------------------------------------

    def wait_for_join(self, on_joined: OnJoined) -> None:
        """Let it wait for the next generation; a wait of before ends, its connection is gone."""
        self.answer_join(
            JoinAnswer(error=ErrorCode.rebalance_in_progress, member_id=self.member_id)
        )
        self.on_joined = on_joined

    def wait_for_sync(self, on_synced: OnSynced) -> None:
        """Let it wait for its assignment; a wait of before ends, its connection is gone."""
        self.answer_sync(SyncAnswer(error=ErrorCode.rebalance_in_progress))
        self.on_synced = on_synced

    def answer_join(self, answer: JoinAnswer) -> bool:
        """End its wait for a generation; False if it does not wait."""
        on_joined, self.on_joined = self.on_joined, None
        if on_joined is None:
            return False
        on_joined(answer)
        return True

    def answer_sync(self, answer: SyncAnswer) -> bool:
        """End its wait for its assignment; False if it does not wait."""
        on_synced, self.on_synced = self.on_synced, None
        if on_synced is None:
            return False
        on_synced(answer)
        return True


def _unheard(_: JoinAnswer) -> None:
    """Answer nobody."""
