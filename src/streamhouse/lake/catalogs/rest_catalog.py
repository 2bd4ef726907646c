"""pyiceberg's REST catalog with two additions: no request waits for ever, none goes in circles.

For every opener of a lake catalog: the service, tiering, and readers on a driver. A commit to
several tables is atomic, in the catalog's server: requests carry this service's own credentials,
never the caller's, and an answer that is no certain refusal leaves the outcome unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import urlsplit

from pyiceberg.catalog import PY_CATALOG_IMPL, TYPE
from pyiceberg.catalog.rest import (
    AUTH,
    DEFAULT_ENDPOINTS,
    SNAPSHOT_LOADING_MODE,
    SSL,
    VIEW_ENDPOINTS,
    Endpoint,
    HttpMethod,
    RestCatalog,
)
from pyiceberg.catalog.rest.auth import AUTH_MANAGER, AuthManager
from pyiceberg.catalog.rest.response import _handle_non_200_response
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.table import CommitTableRequest
from requests import ConnectionError as RequestsConnectionError
from requests import ConnectTimeout, HTTPError, PreparedRequest, ReadTimeout, Response, Session
from requests.adapters import BaseAdapter
from urllib3.exceptions import NewConnectionError

from streamhouse.core.model.lake.facts import (
    CATALOG_TIMEOUT_PROPERTY,
    CATALOG_URIS_PROPERTY,
    VIA_HEADER,
    is_rest_catalog,
)

__all__ = [
    "LakeRestCatalog",
    "commit_many",
    "offers_commit_many",
    "passed_through",
    "with_rest_catalog",
]

_TIMEOUT_MS_DEFAULT: Final = 60_000
# Settings of the opener only: code to load, and files of this machine.
_OWN_ALONE: Final = (
    *(AUTH, AUTH_MANAGER, SSL, PY_CATALOG_IMPL, PY_IO_IMPL),
    CATALOG_URIS_PROPERTY,
)
_CONNECT_S_MAX: Final = 10.0
# A service that does not own its tables says 421; asked in the protocol's form, 503.
_ELSEWHERE: Final = (421, 503)

_COMMIT_PATH: Final = "transactions/commit"
_COMMIT_ENDPOINT: Final = Endpoint(
    http_method=HttpMethod.POST, path=f"/v1/{{prefix}}/{_COMMIT_PATH}"
)
_COMMIT_OUTCOMES: Final[dict[int, type[Exception]]] = {
    404: NoSuchTableError,
    409: CommitFailedException,
    500: CommitStateUnknownException,
    502: CommitStateUnknownException,
    504: CommitStateUnknownException,
}

_passed: ContextVar[tuple[str, ...]] = ContextVar("passed", default=())


def with_rest_catalog(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties with which pyiceberg's `load_catalog` opens a `LakeRestCatalog`."""
    if not is_rest_catalog(properties):
        return dict(properties)
    implementation = {PY_CATALOG_IMPL: f"{LakeRestCatalog.__module__}.{LakeRestCatalog.__name__}"}
    return {key: value for key, value in properties.items() if key != TYPE} | implementation


@contextlib.contextmanager
def passed_through(services: tuple[str, ...]) -> Iterator[None]:
    """Within the block, send catalogs behind the list of services that this request has passed."""
    token = _passed.set(services)
    try:
        yield
    finally:
        _passed.reset(token)


class LakeRestCatalog(RestCatalog):
    """A REST catalog with a time limit for answers (`CATALOG_TIMEOUT_PROPERTY`, in ms).

    Connecting has the same limit, and at most ten seconds. A request that was sent and not answered
    in time raises `requests.ReadTimeout`: the server may have carried out the request.

    The server's configuration chooses no code. Tables are loaded with every snapshot: otherwise
    files of missing snapshots would count as orphans.
    """

    def _fetch_config(self) -> None:
        client_properties = self.properties
        super()._fetch_config()
        served = {k: v for k, v in self.properties.items() if k not in _OWN_ALONE}
        self.properties = served | {
            k: client_properties[k] for k in _OWN_ALONE if k in client_properties
        }
        self.properties.pop(SNAPSHOT_LOADING_MODE, None)

    def _create_session(self) -> Session:
        session = super()._create_session()
        # A way of signing requests may have brought an adapter of its own.
        self._watch(session)
        return session

    def _create_legacy_oauth2_auth_manager(self, session: Session) -> AuthManager:
        # The session requests a token at once.
        self._watch(session)
        return super()._create_legacy_oauth2_auth_manager(session)

    def _watch(self, session: Session) -> None:
        text = self.properties.get(CATALOG_TIMEOUT_PROPERTY)
        timeout_s = (_TIMEOUT_MS_DEFAULT if text is None else int(text)) / 1000
        uris = self.properties.get(CATALOG_URIS_PROPERTY, "")
        places = _Places(tuple(uri for uri in uris.split(",") if uri))
        for prefix, adapter in list(session.adapters.items()):
            if not isinstance(adapter, _WatchedAdapter):
                session.mount(prefix, _WatchedAdapter(adapter, timeout_s, places))


class _Places:
    """The processes of a service, any of them perhaps the owner, each with the catalog at a URI."""

    def __init__(self, uris: tuple[str, ...]) -> None:
        self._uris = uris
        self._first = 0

    def urls(self, url: str) -> list[str]:
        """Return the addresses to try for `url`, in order: at least `url`."""
        for uri in self._uris:
            if url.startswith(f"{uri}/"):
                path = url[len(uri) :]
                in_turn = self._uris[self._first :] + self._uris[: self._first]
                return [base + path for base in in_turn]
        return [url]

    def answered(self, url: str) -> None:
        """Begin with this process, the last to answer, from now on."""
        for number, uri in enumerate(self._uris):
            if url.startswith(f"{uri}/"):
                self._first = number


class _WatchedAdapter(BaseAdapter):
    """Sends through `inner` with a time limit, and lists the services that a request has passed.

    An unreachable service, or an answer of a process that is not the owner, has no effect: the
    request goes on to the next of `places`.
    """

    def __init__(self, inner: BaseAdapter, timeout_s: float, places: _Places) -> None:
        super().__init__()
        self._inner = inner
        self._places = places
        self._connect_s = min(timeout_s, _CONNECT_S_MAX)
        self._read_s = timeout_s

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        via = request.headers.get(VIA_HEADER)
        if isinstance(via, str) and "," not in via:
            request.headers[VIA_HEADER] = ",".join((*_passed.get(), via))
        *urls, last = self._places.urls(str(request.url))
        how = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        for url in urls:
            request.url = url
            try:
                response = self._send(request, timeout, how)
            except RequestsConnectionError as error:
                if not _is_unreachable(error):
                    raise
                continue
            if response.status_code not in _ELSEWHERE:
                self._places.answered(url)
                return response
            response.close()
        request.url = last
        response = self._send(request, timeout, how)
        if response.status_code not in _ELSEWHERE:
            self._places.answered(last)
        return response

    def _send(self, request: PreparedRequest, timeout: Any, how: Mapping[str, Any]) -> Response:
        where = f"the catalog at {urlsplit(str(request.url)).netloc}"
        try:
            return self._inner.send(
                request, timeout=timeout or (self._connect_s, self._read_s), **how
            )
        except ConnectTimeout as error:
            raise ConnectTimeout(
                f"{where} took no connection within {self._connect_s:g} s", request=request
            ) from error
        except ReadTimeout as error:
            raise ReadTimeout(
                f"{where} did not answer within {self._read_s:g} s (catalog_timeout_ms)",
                request=request,
            ) from error

    def close(self) -> None:
        self._inner.close()


def _is_unreachable(error: RequestsConnectionError) -> bool:
    """Whether no connection was made, and nothing was sent."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(error, ConnectTimeout) or isinstance(reason, NewConnectionError)


def offers_commit_many(catalog: RestCatalog) -> bool:
    """Whether the catalog's server offers atomic commits to several tables.

    By the protocol a server without a list of its endpoints offers the endpoint.
    """
    offered = catalog._supported_endpoints
    return _COMMIT_ENDPOINT in offered or offered - VIEW_ENDPOINTS == DEFAULT_ENDPOINTS


def commit_many(catalog: RestCatalog, changes: Sequence[CommitTableRequest]) -> None:
    """Change all tables or none; raises the same errors as pyiceberg's commit of a single table."""
    commits = ",".join(change.model_dump_json() for change in changes)
    body = f'{{"table-changes":[{commits}]}}'.encode()
    try:
        _post(catalog, body)
    except (AuthorizationExpiredError, UnauthorizedError):
        # Expired credentials are renewed once; a request refused for them had no effect.
        catalog._refresh_token()
        _post(catalog, body)


def _post(catalog: RestCatalog, body: bytes) -> None:
    response = catalog._session.post(catalog.url(_COMMIT_PATH), data=body)
    try:
        response.raise_for_status()
    except HTTPError as error:
        _handle_non_200_response(error, _COMMIT_OUTCOMES)
