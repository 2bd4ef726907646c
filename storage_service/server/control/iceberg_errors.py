"""Errors of the service in the form of the Iceberg REST protocol."""

from __future__ import annotations

from typing import Any, Final

from streamhouse.storage_service.errors import (
    AlreadyExistsError,
    CommitConflictError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    FencedError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    StreamhouseError,
    TableNotFoundError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.storage_service.server.http.http_exchange import short

__all__ = ["iceberg_error"]

# The first that fits counts: our class -> the protocol's status and type.
_TYPES: Final[tuple[tuple[type[StreamhouseError], int, str], ...]] = (
    (UnauthorizedError, 401, "NotAuthorizedException"),
    (ForbiddenError, 403, "ForbiddenException"),
    (TableNotFoundError, 404, "NoSuchTableException"),
    (DatabaseNotFoundError, 404, "NoSuchNamespaceException"),
    (NotFoundError, 404, "NotFoundException"),
    (DatabaseNotEmptyError, 409, "NamespaceNotEmptyException"),
    (AlreadyExistsError, 409, "AlreadyExistsException"),
    (CommitConflictError, 409, "CommitFailedException"),
    (FencedError, 409, "CommitFailedException"),
    (UnknownOutcomeError, 500, "CommitStateUnknownException"),
    (OverloadedError, 503, "ServiceUnavailableException"),
    (UnavailableError, 503, "ServiceUnavailableException"),
    (UnsupportedError, 501, "UnsupportedOperationException"),
    (InvalidRequestError, 400, "BadRequestException"),
)


def iceberg_error(error: StreamhouseError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that the protocol has for `error`."""
    status, name = error.http_status, "InternalServerError"
    for kind, kind_status, kind_name in _TYPES:
        if isinstance(error, kind):
            status, name = kind_status, kind_name
            break
    return status, {
        "error": {
            "message": short(error.message).encode("utf-8", "backslashreplace").decode(),
            "type": name,
            "code": status,
        }
    }
