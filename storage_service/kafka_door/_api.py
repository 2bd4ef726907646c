"""An API of Kafka, as offered by this door: versions, and the function that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import Piece

__all__ = ["Answer", "Api", "ConnectionEnded", "Refuse"]

Answer: TypeAlias = Mapping[str, Any] | Sequence[Piece] | None
"""The fields of the answer, or the encoded body in pieces, or None for no answer."""

Refuse: TypeAlias = Callable[[Any, ErrorCode, str], Mapping[str, Any]]
"""Request, error code and message -> an answer with the error in every place."""


class ConnectionEnded(Exception):
    """The connection has to be closed; the message is for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API of Kafka.

    `answer` gets the exchange and the request, which is kio's entity of the request's version.
    `refuse` answers the errors of `answer`. Without `refuse`, the error goes into the top-level
    `error_code`; an answer without this field ends the connection.
    """

    key: int
    name: str
    versions: tuple[int, int]
    """The first and the last version that are answered."""
    first_listed: int | None = None
    """The first version that ApiVersions lists, if clients expect an older one without using it."""
    answer: Callable[..., Awaitable[Answer]]
    refuse: Refuse | None = None
    keep: Callable[[Any], Any] | None = None
    """Request -> the smaller value that a waiting request keeps for `answer` and `refuse`."""
    is_open: bool = False
    """Whether clients without a token are answered."""
    is_read: bool = False
    """Whether only the present owner of the data may answer."""
    is_write: bool = False
    """Whether requests bring rows: requests may be large, and several may be in progress."""

    @property
    def listed_from(self) -> int:
        """The first version that ApiVersions lists."""
        return self.versions[0] if self.first_listed is None else self.first_listed
