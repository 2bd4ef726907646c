"""One request to the REST catalog and its answer, without HTTP."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamhouse.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from streamhouse.lake.guards.table_commits import LakeMetadata

__all__ = ["LIVE", "LivePart", "RestAnswer", "RestRequest", "page_of", "texts_of"]

LIVE: Final = "live"
"""The name of the warehouse that shows live tables, and the prefix of the warehouse's routes."""

_T = TypeVar("_T")
PAGE_SIZE_DEFAULT: Final = 1_000
_DIGITS_MAX: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class RestRequest:
    """`segments` are the decoded parts of the path after `/iceberg/v1/`.

    `sees` returns whether the caller may see a namespace, by the first part of the name. `via` are
    the services that the request came through, each with the next service as its catalog. `etags`
    are the versions of the table that the caller has. A request of the warehouse `live` has its
    segments without the prefix.
    """

    method: str
    segments: tuple[str, ...]
    query: Mapping[str, str]
    wants_credentials: bool = False
    sees: Callable[[str], bool] = lambda _: True
    body: bytes = b""
    via: tuple[str, ...] = ()
    etags: tuple[str, ...] = ()
    is_live: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the request changes nothing."""
        match self.method, self.segments[4:]:
            case "POST", ("metrics" | "plan" | "tasks",):
                return True
            case "DELETE", ("plan", _):
                return True
        return self.method in ("GET", "HEAD")

    def json(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object."""
        try:
            value = json.loads(self.body)
        except RecursionError as error:
            raise InvalidRequestError("the request body is nested too deep") from error
        except ValueError as error:
            raise InvalidRequestError(f"the request body is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequestError("the request body must be a JSON object")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """The service's part of an answer of the warehouse `live`; the catalog answers the rest.

    `databases` may lack a namespace in the catalog. `tables` are the lake tables of the requested
    namespace or table, and `owned` the tables of which the list is complete. `table` is the live
    cut of the requested table.
    """

    databases: Collection[str] = ()
    tables: Collection[str] = ()
    owned: Collection[str] = ()
    table: LakeMetadata | None = None


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """A status and, unless the status is 204 or 304, a JSON body.

    `committed` are the tables with a commit by the request. `etag` names the version of a loaded
    table.
    """

    status: int
    body: bytes = b""
    committed: tuple[tuple[str, ...], ...] = ()
    etag: str | None = None

    @classmethod
    def of(cls, value: Any, *, status: int = 200) -> RestAnswer:
        """Return an answer with `value` as JSON."""
        return cls(status, json.dumps(value).encode())


def page_of(
    items: Sequence[tuple[str, _T]], query: Mapping[str, str]
) -> tuple[list[_T], str | None]:
    """Return one page of `items`, sorted by unique keys, and the token of the next page.

    Without `pageToken` in the query the caller does not support pages and gets all items.
    """
    ordered = sorted(items, key=lambda item: item[0])
    if "pageToken" not in query:
        return [value for _, value in ordered], None
    size_text = query.get("pageSize", str(PAGE_SIZE_DEFAULT))
    if not size_text.isdecimal() or len(size_text) > _DIGITS_MAX or int(size_text) < 1:
        raise InvalidRequestError(f"pageSize = '{size_text[:20]}' must be a whole number from 1 on")
    last_key = _key_of(query["pageToken"])
    remaining = [item for item in ordered if last_key is None or item[0] > last_key]
    page = remaining[: int(size_text)]
    token = _token_of(page[-1][0]) if len(remaining) > len(page) else None
    return [value for _, value in page], token


def _token_of(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _key_of(token: str) -> str | None:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode() if token else None
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"pageToken '{token[:80]}' was not given out here") from error


def texts_of(value: Any, *, name: str) -> dict[str, str]:
    """Return a field of a body as an object of texts; raises for other values."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InvalidRequestError(f"{name} must be an object of texts")
    return value
