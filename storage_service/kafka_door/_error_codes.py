"""Kafka's error code for each error of this project.

The choice depends on the clients' reaction, not on a code's name: a client repeats retriable codes,
looks up the leader after `not_leader_or_follower`, and reports other codes to its user.
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
from streamhouse.storage_service.kafka.protocol_errors import (
    FencedLeaderEpochError,
    InvalidRecordsError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)

__all__ = ["RefusedError", "error_code_of", "is_repeated", "produce_code_of"]


class RefusedError(Exception):
    """An error of Kafka's own, without an equivalent in `StreamhouseError`."""

    def __init__(self, error_code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.message = message


_CODES: Final[Mapping[type[StreamhouseError], ErrorCode]] = {
    AlreadyExistsError: ErrorCode.topic_already_exists,
    # A retry would not help.
    ConsumerLimitError: ErrorCode.policy_violation,
    CorruptDataError: ErrorCode.kafka_storage_error,
    FencedError: ErrorCode.invalid_producer_epoch,
    FencedLeaderEpochError: ErrorCode.fenced_leader_epoch,
    ForbiddenError: ErrorCode.topic_authorization_failed,
    InternalError: ErrorCode.unknown_server_error,
    InvalidNameError: ErrorCode.invalid_topic_exception,
    InvalidRequestError: ErrorCode.invalid_request,
    InvalidSchemaError: ErrorCode.invalid_config,
    # Rows that were read are gone: the client's position is beyond the log.
    LogCutError: ErrorCode.offset_out_of_range,
    NotFoundError: ErrorCode.unknown_topic_or_partition,
    # The client looks up the leader, and goes there.
    NotOwnerError: ErrorCode.not_leader_or_follower,
    OffsetOutOfRangeError: ErrorCode.offset_out_of_range,
    OutOfOrderSequenceError: ErrorCode.out_of_order_sequence_number,
    # `throttling_quota_exceeded` belongs to the administration of topics; producers give up at that
    # code.
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
    # Repeated by idempotent producers; other producers have chosen at-least-once.
    UnknownOutcomeError: ErrorCode.not_enough_replicas_after_append,
    UnsupportedError: ErrorCode.invalid_request,
}


# At these codes a producer sends the same records again, with the same sequence.
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
    """Return the code of the error's class, or of the nearest base class with a code."""
    for error_class in type(error).__mro__:
        if error_class in _CODES:
            return _CODES[error_class]
    return ErrorCode.unknown_server_error


def produce_code_of(error: StreamhouseError) -> ErrorCode:
    """Return the code of an error for a producer."""
    if isinstance(error, InvalidRecordsError):
        return ErrorCode[error.fault.value.lower()]
    if isinstance(error, OutOfOrderSequenceError) and error.is_unknown_writer:
        # At this code clients begin a new epoch, and repeat the batches in flight.
        return ErrorCode.unknown_producer_id
    if isinstance(error, UnsupportedError):
        return ErrorCode.transactional_id_authorization_failed
    code = error_code_of(error)
    # In a Produce request only the records can be invalid.
    return ErrorCode.invalid_record if code is ErrorCode.invalid_request else code


def is_repeated(error: StreamhouseError) -> bool:
    """Return whether a producer sends the same records again after an error."""
    return produce_code_of(error) in _REPEATED
