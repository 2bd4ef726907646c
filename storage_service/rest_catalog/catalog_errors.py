"""The door for what the Iceberg library and its catalogs raise: it becomes an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pydantic import ValidationError as InvalidModelError
from pyiceberg import exceptions as iceberg

from streamhouse.storage_service.errors import (
    CommitConflictError,
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    ForbiddenError,
    InvalidRequestError,
    StreamhouseError,
    TableExistsError,
    TableNotFoundError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)

__all__ = ["catalog_errors"]

# The first that fits counts. Their messages name the table or namespace.
_KINDS: tuple[tuple[type[Exception], type[StreamhouseError]], ...] = (
    (iceberg.NoSuchTableError, TableNotFoundError),
    (iceberg.NoSuchIdentifierError, TableNotFoundError),
    (iceberg.NoSuchNamespaceError, DatabaseNotFoundError),
    (iceberg.TableAlreadyExistsError, TableExistsError),
    (iceberg.NamespaceAlreadyExistsError, DatabaseExistsError),
    (iceberg.NamespaceNotEmptyError, DatabaseNotEmptyError),
    (iceberg.CommitFailedException, CommitConflictError),
    (iceberg.CommitStateUnknownException, UnknownOutcomeError),
    (iceberg.ForbiddenError, ForbiddenError),
    (iceberg.ValidationError, InvalidRequestError),
    (iceberg.BadRequestError, InvalidRequestError),
    (NotImplementedError, UnsupportedError),
    (InvalidModelError, InvalidRequestError),
    (ValueError, InvalidRequestError),
    (KeyError, InvalidRequestError),
)


@contextlib.contextmanager
def catalog_errors(doing: str, *, is_commit: bool = False) -> Iterator[None]:
    """Raise what the block raises as an error of ours.

    What no catalog refuses on purpose is `UnavailableError`; of a commit it is
    `UnknownOutcomeError`, because it may have landed.
    """
    try:
        yield
    except StreamhouseError:
        raise
    except Exception as error:
        # Catalogs raise what their database, HTTP or cloud client raises: there is no common root.
        for kind, ours in _KINDS:
            if isinstance(error, kind):
                raise ours(f"cannot {doing}: {_sentence(error)}") from error
        lost = UnknownOutcomeError if is_commit else UnavailableError
        raise lost(f"cannot {doing}: {type(error).__name__}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    if isinstance(error, InvalidModelError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return " ".join(str(error).split())
