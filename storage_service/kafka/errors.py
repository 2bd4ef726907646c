"""What is wrong with records that a Kafka client sent, in the words its protocol has for it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from streamhouse.storage_service.errors import InvalidRequestError

__all__ = ["InvalidRecordsError", "RecordsFault", "is_bug"]


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
