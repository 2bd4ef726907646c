"""Which of Kafka's error codes says what an error of ours says.

What a client makes of a code counts more than its name: it repeats what is retriable, asks anew who
has a partition after `not_leader_or_follower`, and tells its user the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.errors import (
    AlreadyExistsError,
    CorruptDataError,
    FencedError,
    ForbiddenError,
    InternalError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSchemaError,
    LogCutError,
    NotFoundError,
    NotOwnerError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    OverloadedError,
    RequestTooLargeError,
    SchemaMismatchError,
    StorageFailedError,
    StreamhouseError,
    TableDamagedError,
    UnauthorizedError,
    UnavailableError,
    UnknownColumnError,
    UnknownOptionError,
    UnknownOutcomeError,
    UnsupportedError,
)

__all__ = ["RefusedError", "error_code_of"]


class RefusedError(Exception):
    """One of Kafka's own errors, which no error of ours says."""

    def __init__(self, error_code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.message = message


_CODES: Final[Mapping[type[StreamhouseError], ErrorCode]] = {
    AlreadyExistsError: ErrorCode.topic_already_exists,
    CorruptDataError: ErrorCode.kafka_storage_error,
    FencedError: ErrorCode.invalid_producer_epoch,
    ForbiddenError: ErrorCode.topic_authorization_failed,
    InternalError: ErrorCode.unknown_server_error,
    InvalidNameError: ErrorCode.invalid_topic_exception,
    InvalidRequestError: ErrorCode.invalid_request,
    InvalidSchemaError: ErrorCode.invalid_config,
    # Rows that were read are not there any more: what the client has is beyond the log.
    LogCutError: ErrorCode.offset_out_of_range,
    NotFoundError: ErrorCode.unknown_topic_or_partition,
    # The client asks anew who has the partition, and goes there.
    NotOwnerError: ErrorCode.not_leader_or_follower,
    OffsetOutOfRangeError: ErrorCode.offset_out_of_range,
    OutOfOrderSequenceError: ErrorCode.out_of_order_sequence_number,
    # `throttling_quota_exceeded` is of topics' administration; producers give up at it.
    OverloadedError: ErrorCode.request_timed_out,
    RequestTooLargeError: ErrorCode.message_too_large,
    SchemaMismatchError: ErrorCode.invalid_record,
    StorageFailedError: ErrorCode.kafka_storage_error,
    TableDamagedError: ErrorCode.kafka_storage_error,
    UnauthorizedError: ErrorCode.sasl_authentication_failed,
    UnavailableError: ErrorCode.not_leader_or_follower,
    UnknownColumnError: ErrorCode.invalid_record,
    UnknownOptionError: ErrorCode.invalid_config,
    # Repeated by who counts its records; whoever does not has asked for at least once.
    UnknownOutcomeError: ErrorCode.not_enough_replicas_after_append,
    UnsupportedError: ErrorCode.invalid_request,
}


def error_code_of(error: StreamhouseError) -> ErrorCode:
    """Return the code of the nearest kind that has one."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return ErrorCode.unknown_server_error
