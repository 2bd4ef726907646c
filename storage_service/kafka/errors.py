"""What is wrong with what a Kafka client sent, where its protocol has a word of its own for it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from streamhouse.core.errors import (
    FencedError,
    InvalidRequestError,
    TableNotFoundError,
    UnavailableError,
)

__all__ = [
    "FencedLeaderEpochError",
    "InvalidRecordsError",
    "RecordsFault",
    "UnknownLeaderEpochError",
    "UnknownTopicIdError",
    "is_bug",
]


def is_bug(error: BaseException) -> bool:
    """Whether what was raised while records were read is a bug, and nobody's wish to end.

    A library in Rust that panics, as pyruhvro may, raises what is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class RecordsFault(Enum):
    """Which of Kafka's errors a client is to see; the values are the names of its error codes."""

    CORRUPT = "CORRUPT_MESSAGE"
    """Bytes changed or were lost on the way: cut off, or not what their checksum says."""
    INVALID = "INVALID_RECORD"
    """The bytes are those that were sent, and are no records."""
    OLD_FORMAT = "UNSUPPORTED_FOR_MESSAGE_FORMAT"
    """Message sets of magic 0 or 1, from before Kafka 0.11."""
    TOO_LARGE = "MESSAGE_TOO_LARGE"
    """More records or bytes than are taken."""
    UNSUPPORTED_COMPRESSION = "UNSUPPORTED_COMPRESSION_TYPE"


class InvalidRecordsError(InvalidRequestError):
    """Bytes are not the record batches they should be; nothing of them is taken."""

    def __init__(
        self,
        message: str,
        *,
        fault: RecordsFault = RecordsFault.INVALID,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.message, self.fault))


def _rebuilt(message: str, fault: RecordsFault) -> InvalidRecordsError:
    return InvalidRecordsError(message, fault=fault)


class FencedLeaderEpochError(FencedError):
    """A client knows the topic as it was: its table was dropped, and another one has its name."""


class UnknownLeaderEpochError(UnavailableError):
    """A client knows the topic as it will be: this process does not have its table yet."""


class UnknownTopicIdError(TableNotFoundError):
    """No table of this process has a topic of this id that the caller may read."""
