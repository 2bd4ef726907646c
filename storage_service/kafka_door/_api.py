"""What an API of Kafka is to this door: its versions, and the function that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import Piece

__all__ = ["Answer", "Api", "ConnectionEnded", "Refuse"]

Answer: TypeAlias = Mapping[str, Any] | Sequence[Piece] | None
"""The values of the answer's fields, or its body as bytes in pieces, or no answer at all."""

Refuse: TypeAlias = Callable[[Any, ErrorCode, str], Mapping[str, Any]]
"""Given a request, an error and its sentence: the answer that says so in every place."""


class ConnectionEnded(Exception):
    """The connection is to be closed; the message is for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API of Kafka.

    `answer` is given the exchange and the request, which is kio's entity of the version asked; an
    error of ours that it raises is answered by `refuse`, and without that in `error_code` at the
    top of the answer, or by closing the connection if there is none.
    """

    key: int
    name: str
    versions: tuple[int, int]
    """The first and the last that is answered."""
    first_told: int | None = None
    """The first that clients are told of, where they expect an older one that none of them asks."""
    answer: Callable[..., Awaitable[Answer]]
    refuse: Refuse | None = None
    keep: Callable[[Any], Any] | None = None
    """Given the request: what is kept of it, for `answer` and `refuse`, of one that may wait."""
    is_open: bool = False
    """Whether it is answered before the client has shown who it is."""
    is_read: bool = False
    """Whether its answer is true only of the process that owns the data at that moment."""
    is_write: bool = False
    """Whether it brings rows: its requests may be large, and several in progress at a time."""

    @property
    def told_from(self) -> int:
        """The first version that clients are told of."""
        return self.versions[0] if self.first_told is None else self.first_told
