"""Every error a user of Streamhouse can meet, with the code that crosses the wire.

StreamhouseError
├── InvalidRequestError            invalid_request           400
│   ├── InvalidNameError           invalid_name              400
│   ├── InvalidSchemaError         invalid_schema            400
│   ├── SchemaMismatchError        schema_mismatch           400
│   │   ├── CheckFailedError       check_failed              400
│   │   └── ColumnDroppedError     column_dropped            400
│   ├── UnknownColumnError         unknown_column            400
│   ├── UnknownOptionError         unknown_option            400
│   ├── InvalidPredicateError      invalid_predicate         400
│   └── UnsupportedError           unsupported               400
├── UnauthorizedError              unauthorized              401
├── ForbiddenError                 forbidden                 403
├── NotFoundError
│   ├── DatabaseNotFoundError      database_not_found        404
│   ├── TableNotFoundError         table_not_found           404
│   ├── BucketNotFoundError        bucket_not_found          404
│   ├── RowNotFoundError           row_not_found             404
│   ├── TransactionNotFoundError   transaction_not_found     404
│   └── SnapshotNotFoundError      snapshot_not_found        404
├── AlreadyExistsError
│   ├── DatabaseExistsError        database_exists           409
│   ├── DatabaseNotEmptyError      database_not_empty        409
│   └── TableExistsError           table_exists              409
├── NotOwnerError                  not_owner                 421
├── OffsetOutOfRangeError          offset_out_of_range       416
├── LogCutError                    log_cut                   409
├── RequestTooLargeError           request_too_large         413
├── OutOfOrderSequenceError        out_of_order_sequence     409
├── FencedError                    fenced                    409
├── HistoryDivergedError           history_diverged          409
├── CommitConflictError            commit_conflict           409
├── TransactionClosedError         transaction_closed        409
├── CorruptDataError               corrupt_data              500
├── TableDamagedError              table_damaged             500
├── OverloadedError                overloaded                503
│   └── ConsumerLimitError         consumer_limit            409
├── UnavailableError               unavailable               503
├── StorageFailedError             storage_failed            503
├── UnknownOutcomeError            unknown_outcome           500
└── InternalError                  internal                  500

`not_owner`, `overloaded`, `unavailable` and `storage_failed` are retriable. A code is never reused
or renamed: clients of any age branch on it.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, ClassVar


class StreamhouseError(Exception):
    """Root of every error Streamhouse raises on purpose.

    `code` is stable and crosses the wire. `retriable` says that the same call may succeed later
    without any change. `http_status` is the status of the service's response.
    """

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark ships errors between processes; keyword-only fields would break the default.
        return (type(self), (self.message,))


class InvalidRequestError(StreamhouseError):
    """A parameter, option or body is malformed."""

    code = "invalid_request"
    http_status = 400


class InvalidNameError(InvalidRequestError):
    """A database, table or column name breaks the naming rules."""

    code = "invalid_name"


class InvalidSchemaError(InvalidRequestError):
    """No table can have this schema, key, bucketing or partitioning."""

    code = "invalid_schema"


class SchemaMismatchError(InvalidRequestError):
    """Data does not fit the table's schema."""

    code = "schema_mismatch"


class ColumnDroppedError(SchemaMismatchError):
    """A write names a column which was dropped after the write's schema version."""

    code = "column_dropped"


class CheckFailedError(SchemaMismatchError):
    """A row breaks a constraint of its table.

    In the service, `broken` is the table, the constraint, and how many rows break it.
    """

    code = "check_failed"
    broken: tuple[str, str, int] | None = None


class UnknownColumnError(InvalidRequestError):
    """A named column does not exist in the table."""

    code = "unknown_column"


class UnknownOptionError(InvalidRequestError):
    """An option or table property does not exist."""

    code = "unknown_option"


class InvalidPredicateError(InvalidRequestError):
    """A `where` expression cannot be parsed or pushed down exactly."""

    code = "invalid_predicate"


class UnsupportedError(InvalidRequestError):
    """The request is well formed but asks for something Streamhouse does not do."""

    code = "unsupported"


class UnauthorizedError(StreamhouseError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class ForbiddenError(StreamhouseError):
    """The token's grants do not allow the call, or the call would break a service's promise."""

    code = "forbidden"
    http_status = 403


class NotFoundError(StreamhouseError):
    """Something named does not exist."""

    code = "not_found"
    http_status = 404
    table: str | None = None
    """The requested table, if another process may have it. This field never crosses the wire."""


class DatabaseNotFoundError(NotFoundError):
    """The database does not exist."""

    code = "database_not_found"


class TableNotFoundError(NotFoundError):
    """The table does not exist."""

    code = "table_not_found"


class BucketNotFoundError(NotFoundError):
    """The table has no such bucket."""

    code = "bucket_not_found"


class RowNotFoundError(NotFoundError):
    """No row has this primary key."""

    code = "row_not_found"


class TransactionNotFoundError(NotFoundError):
    """The transaction was never begun, was aborted, timed out, or committed long ago."""

    code = "transaction_not_found"


class SnapshotNotFoundError(NotFoundError):
    """The lake snapshot does not exist, or was expired."""

    code = "snapshot_not_found"


class MethodNotAllowedError(StreamhouseError):
    """The path has no such method; the header `Allow` has the path's methods."""

    code = "method_not_allowed"
    http_status = 405


class AlreadyExistsError(StreamhouseError):
    """Something with that name exists."""

    code = "already_exists"
    http_status = 409


class DatabaseExistsError(AlreadyExistsError):
    """The database exists."""

    code = "database_exists"


class DatabaseNotEmptyError(AlreadyExistsError):
    """The database still has tables."""

    code = "database_not_empty"


class TableExistsError(AlreadyExistsError):
    """The table exists."""

    code = "table_exists"


class NotOwnerError(StreamhouseError):
    """This process does not serve the requested resource, and did nothing.

    `owner` is the URL of the serving process, or None if unknown.
    """

    code = "not_owner"
    retriable = True
    http_status = 421

    def __init__(
        self, message: str, *, owner: str | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message,), {"owner": self.owner})


class OffsetOutOfRangeError(StreamhouseError):
    """The offset is outside of the log, or rows since the time are in neither log nor lake."""

    code = "offset_out_of_range"
    http_status = 416


class LogCutError(StreamhouseError):
    """The log lost rows after a read, and has other rows, or none, at their offsets."""

    code = "log_cut"
    http_status = 409


class RequestTooLargeError(StreamhouseError):
    """A body, row count or batch is over the service's limit."""

    code = "request_too_large"
    http_status = 413


class OutOfOrderSequenceError(StreamhouseError):
    """An idempotent writer skipped a sequence, or repeated one too old to remember.

    With `is_unknown_writer` the first sequence is not 0, and the service remembers no earlier
    sequence of the writer.
    """

    code = "out_of_order_sequence"
    http_status = 409

    def __init__(
        self, message: str, *, request_id: str | None = None, is_unknown_writer: bool = False
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.is_unknown_writer = is_unknown_writer


class FencedError(StreamhouseError):
    """A newer epoch of tiering or of a Kafka producer exists; holders of older epochs must stop."""

    code = "fenced"
    http_status = 409


class HistoryDivergedError(StreamhouseError):
    """A table's lake and its log have different rows under the same offsets."""

    code = "history_diverged"
    http_status = 409


class CommitConflictError(StreamhouseError):
    """A table is not in the state which a commit requires; read the table again and commit anew."""

    code = "commit_conflict"
    http_status = 409


class TransactionClosedError(StreamhouseError):
    """The transaction is decided: staging is refused, and a commit of other parts."""

    code = "transaction_closed"
    http_status = 409


class CorruptDataError(StreamhouseError):
    """Stored bytes fail their checksum or format check and are never returned as data."""

    code = "corrupt_data"


class TableDamagedError(StreamhouseError):
    """The table's files are damaged or cannot be read; the service has set it out of use."""

    code = "table_damaged"


class OverloadedError(StreamhouseError):
    """A queue, connection or memory limit is full; try again later."""

    code = "overloaded"
    retriable = True
    http_status = 503


class ConsumerLimitError(OverloadedError):
    """A table has the most consumers allowed: forget one, or this consumer stays out."""

    code = "consumer_limit"
    retriable = False
    http_status = 409


class UnavailableError(StreamhouseError):
    """The service is starting, draining, or cannot be reached."""

    code = "unavailable"
    retriable = True
    http_status = 503


class StorageFailedError(StreamhouseError):
    """The disk refused the write; nothing of the request was stored."""

    code = "storage_failed"
    retriable = True
    http_status = 503

    @property
    def is_for_want_of_room(self) -> bool:
        """Whether the disk is full, rather than damaged."""
        reasons = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)
        return any(text in self.message for text in reasons)


class UnknownOutcomeError(StreamhouseError):
    """The request may or may not have taken effect; the caller must check before a retry."""

    code = "unknown_outcome"


class InternalError(StreamhouseError):
    """A bug in the service."""

    code = "internal"


def _leaves(root: type[StreamhouseError]) -> dict[str, type[StreamhouseError]]:
    # A code stands for the class that defines the code, not for subclasses without a code.
    classes = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        classes |= _leaves(child)
    return classes


def error_for_code(
    code: str, message: str, *, request_id: str | None = None, owner: str | None = None
) -> StreamhouseError:
    """Rebuild the error class for `code`; an unknown code becomes `InternalError`.

    `owner` is the extra field of `not_owner`.
    """
    if code == NotOwnerError.code:
        return NotOwnerError(message, owner=owner, request_id=request_id)
    classes = _leaves(StreamhouseError) | {InternalError.code: InternalError}
    return classes.get(code, InternalError)(message, request_id=request_id)


_SUGGESTED_NAME_MAX = 100
_COMPARED_CHARACTERS_MAX = 5_000
_LISTED_CHARACTERS_MAX = 1_000
_SLIPS_MAX = 3
_PARTS = re.compile(r"[._\- ]+")


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or an empty string if none is near.

    A near name differs by at most one slip of the keys for every three letters. Case, separators,
    and leading parts common to both names, as `table.log.`, do not count. Long names, and long
    lists of names, get no suggestion: the time grows with the product of the lengths.
    """
    if len(name) > _SUGGESTED_NAME_MAX or sum(map(len, known)) > _COMPARED_CHARACTERS_MAX:
        return ""
    capitals = sum(map(str.isupper, name))
    slips = [
        (_slips(name, candidate), abs(sum(map(str.isupper, candidate)) - capitals), candidate)
        for candidate in known
    ]
    count, _, nearest = min(slips, default=(_SLIPS_MAX + 1, 0, ""))
    return f"; did you mean '{nearest}'?" if count <= _SLIPS_MAX else ""


def _slips(name: str, known_name: str) -> int:
    """Return how many slips turn `known_name` into `name`; above `_SLIPS_MAX` if not near."""
    parts, known_parts = (_PARTS.split(text.lower()) for text in (name, known_name))
    while parts[1:] and known_parts[1:] and parts[0] == known_parts[0]:
        del parts[0], known_parts[0]
    typed, meant = "".join(parts), "".join(known_parts)
    longest = max(len(typed), len(meant))
    slips_max = min(max(1, longest // 3), _SLIPS_MAX)
    if abs(len(typed) - len(meant)) > slips_max:
        return _SLIPS_MAX + 1
    count = _edits(typed, meant, edits_max=slips_max)
    return count if count <= slips_max and 2 * count < longest else _SLIPS_MAX + 1


def _edits(typed: str, meant: str, *, edits_max: int) -> int:
    """Return how many letters to add, drop, replace or swap with a neighbour, no letter twice.

    The algorithm is optimal string alignment, row by row. A distance above `edits_max` only returns
    some number above `edits_max`.
    """
    previous, row = list[int](), list(range(len(meant) + 1))
    for i, letter in enumerate(typed, start=1):
        previous, second_last, row = row, previous, [i]
        for j, meant_letter in enumerate(meant, start=1):
            count = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != meant_letter))
            if i > 1 and j > 1 and letter == meant[j - 2] and typed[i - 2] == meant_letter:
                count = min(count, second_last[j - 2] + 1)
            row.append(count)
        if min(*row, *previous) > edits_max:
            return edits_max + 1
    return row[-1]


def listing(what: str, names: list[str]) -> str:
    """Return `columns: a, b`, or only the number of names if the list would be long."""
    if sum(map(len, names)) > _LISTED_CHARACTERS_MAX:
        return f"{what}: {len(names)} of them"
    return f"{what}: {', '.join(names)}"
