"""Errors in the form of a schema registry: a status, and a code with the status as prefix."""

from __future__ import annotations

from typing import Any, Final

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotOwnerError,
    RequestTooLargeError,
    SchemaMismatchError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.storage_service.server.http.http_exchange import short

__all__ = ["NO_SCHEMA", "NO_SUBJECT", "NO_VERSION", "RegistryRefusedError", "registry_error"]

NO_SUBJECT: Final = 40401
NO_VERSION: Final = 40402
NO_SCHEMA: Final = 40403
INVALID_VERSION: Final = 42202
INVALID_LEVEL: Final = 42203
NOT_PERMITTED: Final = 42205
# The first matching class counts: error class -> status and code.
_CODES: Final[tuple[tuple[type[StreamhouseError], int, int], ...]] = (
    (TableNotFoundError, 404, NO_SUBJECT),
    (SchemaMismatchError, 409, 409),
    (InvalidNameError, 422, 42208),
    (RequestTooLargeError, 422, 42209),
    (InvalidRequestError, 422, 42201),
    # The registry's clients do not follow owners: the clients try again later.
    (NotOwnerError, 503, 50301),
)


class RegistryRefusedError(Exception):
    """A request refused with a code of the registry."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Return status and body."""
        return self.code // 100, {"error_code": self.code, "message": short(self.message)}


def registry_error(error: StreamhouseError) -> tuple[int, dict[str, Any]]:
    """Return the registry's status and body for `error`."""
    status, code = error.http_status, error.http_status * 100 + 1
    for kind, kind_status, kind_code in _CODES:
        if isinstance(error, kind):
            status, code = kind_status, kind_code
            break
    return status, {"error_code": code, "message": short(error.message)}
