"""Errors of the Iceberg library and its catalogs: each becomes a Streamhouse error, only here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError as InvalidModelError
from pyiceberg import exceptions as iceberg
from requests import ConnectionError as RequestsConnectionError
from requests import ConnectTimeout

from streamhouse.core.errors import (
    CommitConflictError,
    CorruptDataError,
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

__all__ = ["catalog_errors", "lake_errors", "metadata_errors", "sentence_of"]

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
    (iceberg.NotInstalledError, UnsupportedError),
    (InvalidModelError, InvalidRequestError),
    (ValueError, InvalidRequestError),
    (KeyError, InvalidRequestError),
)
# After sending a commit: the answer could not be read.
_UNREADABLE: Final = (InvalidModelError, ValueError, KeyError)

# Refusals of a REST catalog behind this one; 5xx is no refusal: the commit may have landed.
_REFUSALS: Final[dict[int, type[StreamhouseError]]] = {
    400: InvalidRequestError,
    401: UnavailableError,
    404: TableNotFoundError,
    405: UnsupportedError,
    406: UnsupportedError,
    413: InvalidRequestError,
    419: UnavailableError,
    422: InvalidRequestError,
    429: UnavailableError,
}
_UNAUTHORIZED: Final = (401, 419)
_SENTENCE_CHARACTERS_MAX: Final = 2_000


@contextlib.contextmanager
def catalog_errors(
    doing: str, *, is_commit: bool = False, is_checked: bool = False
) -> Iterator[None]:
    """Raise any error of the block as a Streamhouse error.

    An error other than a refusal of the catalog is `UnavailableError`; after sending a commit
    `UnknownOutcomeError`, because the commit may have landed. With `is_checked` the commit was
    checked before and is right: an apparent refusal is an unreadable answer.
    """
    try:
        yield
    except StreamhouseError:
        raise
    except Exception as error:
        # Catalogs raise errors of their database, HTTP or cloud client, without a common root.
        for kind, ours in _KINDS:
            if isinstance(error, kind) and not (is_checked and kind in _UNREADABLE):
                raise ours(f"cannot {doing}: {sentence_of(error)}") from error
        refused = _refusal_of(error)
        if refused is not None:
            raise refused(f"cannot {doing}: {sentence_of(error)}") from error
        is_sent = not isinstance(error, ConnectTimeout)
        lost = UnknownOutcomeError if is_commit and is_sent else UnavailableError
        raise lost(f"cannot {doing}: {type(error).__name__}: {sentence_of(error)}") from error


@contextlib.contextmanager
def metadata_errors(table: str) -> Iterator[None]:
    """Raise what decoding a lake table's manifests raises inside the block as an error of ours.

    A store that cannot be asked is `UnavailableError`; all else is `CorruptDataError`.
    """
    try:
        yield
    except StreamhouseError:
        raise
    except Exception as error:
        # Damaged Avro may end in any error at all, whose text may have the file's bytes in it.
        kind = type(error).__name__
        if isinstance(error, OSError):
            kind += f": {sentence_of(error)}"
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise UnavailableError(
                f"cannot read metadata of lake table '{table}': {kind}"
            ) from error
        raise CorruptDataError(
            f"lake table '{table}': its manifests are damaged ({kind}); restore them from a copy,"
            " or roll the table back to a snapshot that can be read"
        ) from error


@contextlib.contextmanager
def lake_errors(doing: str) -> Iterator[None]:
    """Raise any error of the block as a Streamhouse error, for work of the service itself.

    An error in the table or the configuration is `UnsupportedError`; any other error is worth a
    later attempt and `UnavailableError`.
    """
    try:
        yield
    except StreamhouseError:
        raise
    except (NotImplementedError, ValueError, ImportError) as error:
        raise UnsupportedError(f"cannot {doing}: {error}") from error
    except Exception as error:
        # Each catalog has its own errors, without a common root.
        raise UnavailableError(
            f"cannot {doing}: {type(error).__name__}: {sentence_of(error)}"
        ) from error


def _refusal_of(error: Exception) -> type[StreamhouseError] | None:
    """Return a REST catalog's refusal as an error, None for anything else."""
    response: Any = getattr(error.__cause__, "response", None)
    if not isinstance(error, iceberg.RESTError) or response is None:
        return None
    if response.status_code == 503:
        # A proxy also answers 503, for a request already passed on.
        return UnavailableError if _is_of_protocol(response.text) else None
    return _REFUSALS.get(response.status_code)


def _is_of_protocol(text: str) -> bool:
    try:
        return bool(json.loads(text)["error"]["code"] == 503)
    except (ValueError, TypeError, KeyError):
        return False


def sentence_of(error: BaseException) -> str:
    """Return the text of `error` on one line, without the statement of a database's error."""
    if isinstance(error, InvalidModelError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    # SQLAlchemy adds the statement, its values and a link to its own manual.
    cause = getattr(error, "orig", None) or error
    text = _lost_connection(cause) or " ".join(str(cause).split())[:_SENTENCE_CHARACTERS_MAX]
    response: Any = getattr(error.__cause__, "response", None)
    if response is not None and response.status_code in _UNAUTHORIZED:
        return f"the catalog behind this one refused the service's own credentials: {text}"
    return text


def _lost_connection(error: BaseException) -> str:
    """Return the place and the first cause of a lost connection; "" for any other error.

    The text of the HTTP library is the `repr` of objects.
    """
    url = getattr(getattr(error, "request", None), "url", None)
    first = error.args[0] if error.args and isinstance(error, RequestsConnectionError) else None
    if url is None or not isinstance(first, BaseException):
        return ""
    while (cause := _cause_of(first)) is not None:
        first = cause
    return f"{urlsplit(str(url)).netloc}: {getattr(first, 'strerror', None) or first}"


def _cause_of(error: BaseException) -> BaseException | None:
    causes = (getattr(error, "reason", None), *reversed(error.args), error.__cause__)
    return next((cause for cause in causes if isinstance(cause, BaseException)), None)
