"""The Iceberg REST protocol over one catalog: the dispatch of requests to routes.

Blocking, and called from several threads. An error is a `StreamhouseError`; the server converts the
error to the protocol's form.
"""

from __future__ import annotations

from typing import Final, NoReturn

from streamhouse.core.errors import (
    ForbiddenError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    StreamhouseError,
    UnsupportedError,
    suggestion,
)
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.lake.catalogs.open_catalog import OpenCatalog
from streamhouse.lake.catalogs.rest_catalog import passed_through
from streamhouse.lake.guards.lake_look import readable_head
from streamhouse.lake.guards.served_tables import ServedTable, ServedTables
from streamhouse.lake.iceberg_errors import catalog_errors
from streamhouse.storage_service.rest_catalog._catalog_properties import FileAccess, HiddenValues
from streamhouse.storage_service.rest_catalog._routes import (
    NamespaceRoutes,
    TableRoutes,
    namespace_of,
)
from streamhouse.storage_service.rest_catalog.rest_request import (
    LIVE,
    LivePart,
    RestAnswer,
    RestRequest,
)

__all__ = ["RestCatalogApi"]

_NOTHING: Final = LivePart()
_NAMESPACE: Final = "/v1/{prefix}/namespaces/{namespace}"
_TABLE: Final = f"{_NAMESPACE}/tables/{{table}}"
ENDPOINTS: Final = (
    "GET /v1/{prefix}/namespaces",
    "POST /v1/{prefix}/namespaces",
    f"GET {_NAMESPACE}",
    f"HEAD {_NAMESPACE}",
    f"DELETE {_NAMESPACE}",
    f"POST {_NAMESPACE}/properties",
    f"GET {_NAMESPACE}/tables",
    f"POST {_NAMESPACE}/tables",
    f"POST {_NAMESPACE}/register",
    f"GET {_TABLE}",
    f"HEAD {_TABLE}",
    f"POST {_TABLE}",
    f"DELETE {_TABLE}",
    f"GET {_TABLE}/credentials",
    f"POST {_TABLE}/metrics",
    f"POST {_TABLE}/plan",
    f"POST {_TABLE}/tasks",
    "POST /v1/{prefix}/tables/rename",
    "POST /v1/{prefix}/transactions/commit",
)
"""The endpoints announced to clients, in the form of the protocol; this catalog has no prefix."""
_LIVE_ENDPOINTS: Final = tuple(
    endpoint
    for endpoint in ENDPOINTS
    if endpoint.startswith(("GET", "HEAD")) or endpoint.endswith(("/metrics", "/plan", "/tasks"))
)


class RestCatalogApi:
    """Answers requests to `/iceberg/v1/...`."""

    def __init__(
        self, catalog: LakeCatalog, *, service_id: str, data_directory: str | None = None
    ) -> None:
        self._open = OpenCatalog(catalog, service_id=service_id, data_directory=data_directory)
        self._files = FileAccess(catalog.properties)
        self._hidden = HiddenValues(catalog.properties)

    def close(self) -> None:
        """Close the catalog's connections."""
        self._open.close()

    def answer(
        self, request: RestRequest, tables: ServedTables, live: LivePart = _NOTHING
    ) -> RestAnswer:
        """Answer one request; `tables` are the service's tables at this time.

        `live` is the service's part of an answer of the warehouse `live`.
        """
        path = "/".join(request.segments)
        try:
            # Errors of commits already state whether the outcome is known.
            doing = f"{request.method} {path[:200]}"
            with passed_through(request.via), catalog_errors(doing, is_commit=not request.is_read):
                return self._answer(request, tables, live)
        except StreamhouseError as error:
            self.raise_shown(error)

    def raise_shown(self, error: StreamhouseError) -> NoReturn:
        """Raise `error`, without the secrets of the catalog."""
        shown = self._hidden.without(error.message)
        if shown == error.message:
            raise error
        # Without the cause: the text of the cause has the secret, too.
        raise type(error)(shown) from None

    def readable_head(self, table: ServedTable) -> int | None:
        """Return the lake snapshot that readers may use now; see `lake_look`."""
        try:
            return readable_head(self._open.get(), table)
        except StreamhouseError as error:
            self.raise_shown(error)

    def _answer(self, request: RestRequest, tables: ServedTables, live: LivePart) -> RestAnswer:
        if any("/" in segment for segment in request.segments):
            # Grants are checked by the segments of the path; a name with '/' would evade the check.
            raise InvalidNameError("a namespace or table must not have '/' in its name")
        if request.is_live and not request.is_read:
            raise ForbiddenError(
                f"the warehouse '{LIVE}' only reads: leave `warehouse` out of the client's settings"
                " to commit to the catalog, and write rows through the streamhouse service"
            )
        match request.segments:
            case ("config",) if not request.is_live:
                return _config(request)
            case ("oauth", "tokens"):
                raise UnsupportedError(
                    "there is no OAuth here: send the service's token as a bearer token (property"
                    " token of the client)"
                )
            case ("namespaces", *segments):
                return self._below_namespaces(request, tables, segments, live)
            case ("tables", "rename") if request.method == "POST":
                return self._table_routes(request, tables, live).rename(request)
            case ("transactions", "commit") if request.method == "POST":
                return self._table_routes(request, tables, live).commit_many(request)
        raise _no_route(request)

    def _below_namespaces(
        self, request: RestRequest, tables: ServedTables, segments: list[str], live: LivePart
    ) -> RestAnswer:
        namespaces = NamespaceRoutes(self._open, live.databases)
        if not segments:
            return _namespaces(namespaces, request)
        namespace = namespace_of(segments[0])
        match request.method, segments[1:]:
            case _, [] | ["properties"]:
                return _one_namespace(namespaces, namespace, request, segments[1:])
            case "GET", ["tables"]:
                return self._table_routes(request, tables, live).list(namespace, request)
            case "POST", ["tables"]:
                return self._table_routes(request, tables, live).create(namespace, request)
            case "POST", ["register"]:
                return self._table_routes(request, tables, live).register(namespace, request)
            case _, ["tables", table, *tail]:
                return self._one_table((*namespace, table), request, tables, tail, live)
            case "GET", ["views"]:
                return RestAnswer.of({"identifiers": []})
            case "GET" | "HEAD", ["views", view]:
                raise NotFoundError(
                    f"view '{view[:200]}' does not exist; this catalog has no views"
                )
            case _, ["views", *_]:
                raise UnsupportedError("this catalog has no views")
        raise _no_route(request)

    def _one_table(
        self,
        identifier: tuple[str, ...],
        request: RestRequest,
        tables: ServedTables,
        tail: list[str],
        live: LivePart,
    ) -> RestAnswer:
        routes = self._table_routes(request, tables, live)
        match request.method, tail:
            case "GET", []:
                return routes.load(identifier, request)
            case "HEAD", []:
                return routes.exists(identifier)
            case "DELETE", []:
                return routes.drop(identifier, request)
            case "POST", []:
                return routes.commit(identifier, request)
            case "GET", ["credentials"]:
                return routes.credentials(identifier)
            case "POST", ["metrics"]:
                request.json()
                return RestAnswer(204)
            case "POST", ["plan"]:
                return routes.plan(identifier, request)
            case "POST", ["tasks"]:
                return routes.tasks(identifier, request)
            case "GET" | "DELETE", ["plan", _]:
                raise NotFoundError(
                    "there is no such plan: the service keeps none, and gives out no plan-id"
                )
        raise _no_route(request)

    def _table_routes(
        self, request: RestRequest, tables: ServedTables, live: LivePart
    ) -> TableRoutes:
        live_of = tables.service_id if request.is_live else None
        return TableRoutes(self._open, tables, self._files, live, live_of=live_of)


def _config(request: RestRequest) -> RestAnswer:
    if request.method != "GET":
        raise _no_route(request)
    # `Live` is no other warehouse: its reader would miss the newest rows in silence.
    warehouse = request.query.get("warehouse", "").casefold()
    is_live = warehouse == LIVE
    # So would the reader of a slip of the keys; names as `hive` are another warehouse.
    if not is_live and warehouse.startswith(LIVE[:2]) and suggestion(warehouse, [LIVE]):
        raise InvalidRequestError(f"there is no warehouse '{warehouse}'; did you mean '{LIVE}'?")
    overrides = {"prefix": LIVE} if is_live else {}
    endpoints = list(_LIVE_ENDPOINTS if is_live else ENDPOINTS)
    return RestAnswer.of({"defaults": {}, "overrides": overrides, "endpoints": endpoints})


def _namespaces(routes: NamespaceRoutes, request: RestRequest) -> RestAnswer:
    match request.method:
        case "GET":
            return routes.list(request)
        case "POST":
            return routes.create(request)
    raise _no_route(request)


def _one_namespace(
    routes: NamespaceRoutes, namespace: tuple[str, ...], request: RestRequest, tail: list[str]
) -> RestAnswer:
    match request.method, tail:
        case "GET", []:
            return routes.load(namespace)
        case "HEAD", []:
            routes.load(namespace)
            return RestAnswer(204)
        case "DELETE", []:
            return routes.drop(namespace)
        case "POST", ["properties"]:
            return routes.update(namespace, request)
    raise _no_route(request)


def _no_route(request: RestRequest) -> UnsupportedError:
    path = "/".join(request.segments)
    return UnsupportedError(f"{request.method} /v1/{path[:200]} is not part of this catalog")
