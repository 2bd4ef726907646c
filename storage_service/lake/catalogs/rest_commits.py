"""Commits of several tables through a catalog that speaks the REST protocol itself.

That catalog makes the commit atomic; here is only how it is asked, and what its answers mean:
- it is asked with this service's own credentials, never with those of the caller
- an answer that is not known to be a refusal leaves the outcome unknown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import requests
from pyiceberg.catalog.rest import (
    DEFAULT_ENDPOINTS,
    VIEW_ENDPOINTS,
    Endpoint,
    HttpMethod,
    RestCatalog,
)
from pyiceberg.catalog.rest.response import _handle_non_200_response
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.table import CommitTableRequest

__all__ = ["commit_many", "offers_commit_many"]

_PATH: Final = "transactions/commit"
_ENDPOINT: Final = Endpoint(http_method=HttpMethod.POST, path=f"/v1/{{prefix}}/{_PATH}")
_OUTCOMES: Final[dict[int, type[Exception]]] = {
    404: NoSuchTableError,
    409: CommitFailedException,
    500: CommitStateUnknownException,
    502: CommitStateUnknownException,
    504: CommitStateUnknownException,
}


def offers_commit_many(catalog: RestCatalog) -> bool:
    """Whether the catalog's server says that it commits several tables together.

    A server that does not say what it offers does, by the protocol.
    """
    offered = catalog._supported_endpoints
    return _ENDPOINT in offered or offered - VIEW_ENDPOINTS == DEFAULT_ENDPOINTS


def commit_many(catalog: RestCatalog, changes: Sequence[CommitTableRequest]) -> None:
    """Change all tables or none; raises what pyiceberg's own commit of one table raises."""
    commits = ",".join(change.model_dump_json() for change in changes)
    body = f'{{"table-changes":[{commits}]}}'.encode()
    try:
        _post(catalog, body)
    except (AuthorizationExpiredError, UnauthorizedError):
        # Credentials that have run out are made anew, once; what is refused for them did nothing.
        catalog._refresh_token()
        _post(catalog, body)


def _post(catalog: RestCatalog, body: bytes) -> None:
    response = catalog._session.post(catalog.url(_PATH), data=body)
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        _handle_non_200_response(error, _OUTCOMES)
