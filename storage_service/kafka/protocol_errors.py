"""Errors in a Kafka client's request for which Kafka's protocol has its own code."""

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
    """Return whether an error of reading records is a bug, rather than a cancellation.

    A panic of a Rust library, such as pyruhvro, raises a class that is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class RecordsFault(Enum):
    """The Kafka error that a client gets; the values are the names of Kafka's codes."""

    CORRUPT = "CORRUPT_MESSAGE"
    """Bytes were damaged on the way: cut off, or with a wrong checksum."""
    INVALID = "INVALID_RECORD"
    """The bytes arrived as sent, but are no records."""
    OLD_FORMAT = "UNSUPPORTED_FOR_MESSAGE_FORMAT"
    """Message sets of magic 0 or 1, from before Kafka 0.11."""
    TOO_LARGE = "MESSAGE_TOO_LARGE"
    """More records or bytes than the limits allow."""
    UNSUPPORTED_COMPRESSION = "UNSUPPORTED_COMPRESSION_TYPE"


class InvalidRecordsError(InvalidRequestError):
    """Bytes are not the expected record batches; none of the bytes is stored."""

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
    """The client knows a dropped table of the topic; another table has the name now."""


class UnknownLeaderEpochError(UnavailableError):
    """The client knows a newer table of the topic than this process."""


class UnknownTopicIdError(TableNotFoundError):
    """No table of this process has this topic id, or the caller may not read the table."""
