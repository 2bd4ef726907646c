"""Which of Kafka's error codes says what an error of ours says.

What a client makes of a code counts more than its name: it repeats what is retriable, asks anew who
has a partition after `not_leader_or_follower`, and tells its user the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    AlreadyExistsError,
    ConsumerLimitError,
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
from streamhouse.storage_service.kafka.errors import (
    FencedLeaderEpochError,
    InvalidRecordsError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)

__all__ = ["RefusedError", "error_code_of", "is_repeated", "produce_code_of"]


class RefusedError(Exception):
    """One of Kafka's own errors, which no error of ours says."""

    def __init__(self, error_code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.message = message


_CODES: Final[Mapping[type[StreamhouseError], ErrorCode]] = {
    AlreadyExistsError: ErrorCode.topic_already_exists,
    # To try again would help nobody.
    ConsumerLimitError: ErrorCode.policy_violation,
    CorruptDataError: ErrorCode.kafka_storage_error,
    FencedError: ErrorCode.invalid_producer_epoch,
    FencedLeaderEpochError: ErrorCode.fenced_leader_epoch,
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
    UnknownLeaderEpochError: ErrorCode.unknown_leader_epoch,
    UnknownTopicIdError: ErrorCode.unknown_topic_id,
    # Repeated by who counts its records; whoever does not has asked for at least once.
    UnknownOutcomeError: ErrorCode.not_enough_replicas_after_append,
    UnsupportedError: ErrorCode.invalid_request,
}


# At these a producer sends the same records again, in the place that they had.
_REPEATED: Final = frozenset(
    {
        ErrorCode.corrupt_message,
        ErrorCode.kafka_storage_error,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.unknown_topic_or_partition,
    }
)


def error_code_of(error: StreamhouseError) -> ErrorCode:
    """Return the code of the nearest kind that has one."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return ErrorCode.unknown_server_error


def produce_code_of(error: StreamhouseError) -> ErrorCode:
    """Return what is said of an error to who sends records."""
    if isinstance(error, InvalidRecordsError):
        return ErrorCode[error.fault.value.lower()]
    if isinstance(error, OutOfOrderSequenceError) and error.is_unknown_writer:
        # Clients begin a new epoch at this one, and repeat what they had in flight.
        return ErrorCode.unknown_producer_id
    if isinstance(error, UnsupportedError):
        return ErrorCode.transactional_id_authorization_failed
    code = error_code_of(error)
    # Of records nothing else can be wrong than they themselves.
    return ErrorCode.invalid_record if code is ErrorCode.invalid_request else code


def is_repeated(error: StreamhouseError) -> bool:
    """Whether who sent records sends the same ones again when it is told of an error."""
    return produce_code_of(error) in _REPEATED
