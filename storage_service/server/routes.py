"""The table of routes: method, path, grant of the caller, and the part that answers.

The rows here are the service's own; each door adds rows (`doors.py`). The application and access
control read the table. The control routes are FastAPI routes built from the rows; each row is bound
to the function of the same name. A route needs a row, and a row needs a grant.

Rows without a name answer nothing. Such rows state the grant for paths without a route. An
unauthorised caller gets 403 before the handler runs, so 404 reveals nothing.
"""

from __future__ import annotations

import enum
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server.caller import Level, Need
from streamhouse.storage_service.server.http.http_exchange import Body

__all__ = [
    "ANY",
    "ANY_TOKEN",
    "API_PAGE_FILES",
    "DOCUMENT_FILES",
    "HEALTH_PATH",
    "METRICS_PATH",
    "OPEN_PAGES",
    "READING",
    "READY_PATH",
    "ROUTES",
    "STATUS_PAGE_PATH",
    "Answer",
    "Route",
    "RouteMatch",
    "RouteTable",
    "control",
    "unrouted",
]

ANY: Final = "*"
"""As a method: all methods without a row of the same path."""
READING: Final = "GET, HEAD"
ANY_TOKEN: Final = "any token"
"""As a need: any valid token. The handler checks the grants for each table."""
OPEN: Final = "nothing"
HEALTH_PATH: Final = "/health"
READY_PATH: Final = "/ready"
METRICS_PATH: Final = "/metrics"
STATUS_PAGE_PATH: Final = "/"
API_PAGE_FILES: Final[Mapping[str, str]] = {
    "/docs": "docs.html",
    "/docs/docs.js": "docs.js",
    "/docs/swagger-ui.css": "swagger-ui.css",
    "/docs/swagger-ui-bundle.js": "swagger-ui-bundle.js",
}
"""Path -> file, for the page that describes the control routes."""
_DOCUMENTS: Final = importlib.resources.files("streamhouse.storage_service.server.control")
DOCUMENT_FILES: Final[Mapping[str, str]] = {
    f"/docs/{file.name}": file.name
    for file in _DOCUMENTS.joinpath("documents").iterdir()
    if file.name.endswith(".md")
}
"""Path -> file, for the documents of this version, as Markdown."""
OPEN_PAGES: Final = frozenset((STATUS_PAGE_PATH, *API_PAGE_FILES, *DOCUMENT_FILES))
"""Pages without data: a page fetches its data with a token."""
# These answers describe the process, so a process without the data may give them.
_OF_THE_PROCESS: Final = frozenset(("health", "page", "status", "metrics"))
# Routes that may change state and whose answers describe the present state.
_PLANS: Final = frozenset(("claim", "heartbeat", "compare_history", "fail"))
_READS: Final = frozenset(("GET", READING))
_NEED: Final = re.compile(r"(read|write|admin):([\w{}.*]+)")


class Answer(enum.Enum):
    """Which part of the service answers a route."""

    NOTHING = enum.auto()
    PROCESS = enum.auto()
    """State of the process, with or without an owned shard: `_process_answers.py`."""
    DATA = enum.auto()
    """Rows: a function of data/, straight on ASGI."""
    CONTROL = enum.auto()
    """JSON: a function of control/, by FastAPI."""
    PAGES = enum.auto()
    """The description of the control routes, which FastAPI makes."""
    DOOR = enum.auto()
    """The door that brought the row, in the form of another protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One row of the table.

    In `path`, `{name}` is one segment, and a final `...` is any number of segments, including zero.
    `need` is `ANY_TOKEN`, `OPEN`, or a grant with placeholders for parameters of the path.
    """

    method: str
    path: str
    need: str
    name: str = ""
    """The name of the handler function; metrics are counted by this name."""
    answer: Answer = Answer.NOTHING
    body: Body = Body.JSON
    is_about_service: bool = False
    """Whether the route serves operators: such requests are admitted when the service is full."""
    takes_password: bool = False
    """Whether Basic authentication is accepted, with the token as the password."""
    tag: str = ""
    """The section of the control routes' description."""

    @property
    def is_read(self) -> bool:
        """Whether only the present owner of the data may give the answer.

        The remaining routes answer from stored data or about the process.
        """
        if self.answer is Answer.PAGES or self.name in _OF_THE_PROCESS:
            return False
        return self.need.startswith("read:") or self.method in _READS or self.name in _PLANS

    def __post_init__(self) -> None:
        assert self.need in (ANY_TOKEN, OPEN) or _NEED.fullmatch(self.need), self
        assert bool(self.name) == (self.answer is not Answer.NOTHING), self


class RouteMatch(NamedTuple):
    """The row of a request, and the parameters of the request's path."""

    route: Route
    parameters: dict[str, str]

    def need(self) -> Need:
        """Return the need of the request; raises `InvalidNameError` for an invalid table name."""
        match = _NEED.fullmatch(self.route.need)
        if match is None:
            return Need(Level.READ, None)
        if match[2] == "{path}":
            return Need(Level[match[1].upper()], str(TablePath.parse(self.parameters["path"])))
        return Need(Level[match[1].upper()], match[2].format_map(self.parameters))


def _data(method: str, path: str, need: str, name: str) -> Route:
    path = "/v1/tables/{path}" + path
    return Route(method=method, path=path, need=need, name=name, answer=Answer.DATA, body=Body.ROWS)


def control(
    tag: str, prefix: str, *rows: tuple[str, str, str, str], about: bool = False
) -> tuple[Route, ...]:
    """Return rows of control routes: method, path after `prefix`, need, name of the function."""
    return tuple(
        Route(
            method=method,
            path=prefix + path,
            need=need,
            name=name,
            answer=Answer.CONTROL,
            is_about_service=about,
            tag=tag,
        )
        for method, path, need, name in rows
    )


def _process(path: str, need: str, name: str) -> Route:
    return Route(
        method="GET",
        path=path,
        need=need,
        name=name,
        answer=Answer.PROCESS,
        is_about_service=True,
    )


def _page(path: str, name: str, need: str) -> Route:
    return Route(method=READING, path=path, need=need, name=name, answer=Answer.PAGES)


def unrouted(path: str, need: str, changing: str = "", *, about: bool = False) -> tuple[Route, ...]:
    """Return the rows of a path without a route: the needs for reading and for changing."""
    return (
        Route(method=READING, path=path, need=need, is_about_service=about),
        Route(method=ANY, path=path, need=changing or need, is_about_service=about),
    )


_DATA: Final = (
    _data("POST", "/append", "write:{path}", "append"),
    _data("POST", "/upsert", "write:{path}", "upsert"),
    _data("POST", "/delete", "write:{path}", "delete"),
    _data("POST", "/transactions/{transaction_id}/stage", "write:{path}", "stage"),
    _data("GET", "/buckets/{bucket}/fetch", "read:{path}", "fetch"),
    _data("GET", "/subscribe", "read:{path}", "subscribe"),
    _data("POST", "/lookup", "read:{path}", "lookup"),
    _data("POST", "/prefix_lookup", "read:{path}", "prefix_lookup"),
    _data("GET", "/count", "read:{path}", "count"),
    _data("GET", "/rows/...", "read:{path}", "row"),
)

_PROCESS: Final = (
    _process(HEALTH_PATH, OPEN, "health"),
    _process(READY_PATH, ANY_TOKEN, "ready"),
    _process(METRICS_PATH, "read:service", "metrics"),
)

_CONTROL: Final = (
    *control(
        "service",
        "",
        ("GET", STATUS_PAGE_PATH, OPEN, "page"),
        ("GET", "/v1/status", "read:service", "status"),
        ("GET", "/v1/shards", "read:service", "list_shards"),
        ("GET", "/v1/shards/targets", "read:service", "shard_targets"),
        about=True,
    ),
    *control("service", "/v1/lake", ("GET", "/catalog", ANY_TOKEN, "lake_catalog")),
    *control(
        "backups",
        "/v1/admin",
        ("POST", "/backup", "admin:service", "stage_backup"),
        ("DELETE", "/backup", "admin:service", "discard_backup"),
        about=True,
    ),
    *control(
        "databases",
        "/v1/databases",
        ("GET", "", ANY_TOKEN, "list_databases"),
        ("POST", "", ANY_TOKEN, "create_database"),
        ("DELETE", "/{name}", "admin:{name}.*", "drop_database"),
    ),
    *control(
        "tables",
        "/v1/tables",
        ("GET", "", ANY_TOKEN, "list_tables"),
        ("POST", "", ANY_TOKEN, "create_table"),
        ("GET", "/{path}", "read:{path}", "describe_table"),
        ("DELETE", "/{path}", "admin:{path}", "drop_table"),
        ("PATCH", "/{path}/properties", "admin:{path}", "alter_properties"),
        ("PUT", "/{path}/partitioning", "admin:{path}", "alter_partitioning"),
        ("PATCH", "/{path}/schema", "admin:{path}", "alter_schema"),
        ("POST", "/{path}/rejected", "write:{path}", "keep_rejected"),
        ("POST", "/{path}/adopt", "admin:{path}", "adopt"),
        ("POST", "/{path}/move", "admin:service", "move_table"),
        ("POST", "/{path}/arrival", "admin:service", "receive_table"),
    ),
    *control(
        "state",
        "/v1/tables/{path}",
        ("GET", "/state", "read:{path}", "table_state"),
        ("GET", "/offsets", "read:{path}", "offsets_for_timestamp"),
        ("GET", "/sizes", "read:{path}", "table_sizes"),
        ("POST", "/lake/history", "read:{path}", "check_lake_history"),
    ),
    *control(
        "lake pins",
        "/v1/tables/{path}/lake/pins",
        ("GET", "", "read:{path}", "pinned_snapshots"),
        ("PUT", "/{holder}", "read:{path}", "pin_snapshot"),
        ("DELETE", "/{holder}", "read:{path}", "unpin_snapshot"),
    ),
    *control(
        "consumers",
        "/v1/tables/{path}/consumers",
        ("GET", "", "read:{path}", "list_consumers"),
        ("PUT", "/{name}", "read:{path}", "report_position"),
        ("DELETE", "/{name}", "read:{path}", "forget_consumer"),
    ),
    *control(
        "transactions",
        "/v1/tables/{path}/transactions",
        ("GET", "", "read:{path}", "list_transactions"),
        ("POST", "", "write:{path}", "begin_transaction"),
        ("GET", "/{transaction_id}", "read:{path}", "transaction_status"),
        ("POST", "/{transaction_id}/commit", "write:{path}", "commit_transaction"),
        ("POST", "/{transaction_id}/abort", "write:{path}", "abort_transaction"),
    ),
    *control("tiering", "/v1/tiering", ("GET", "", "read:service", "tiering_status"), about=True),
    *control(
        "tiering",
        "/v1/tiering",
        ("POST", "/claim", "write:service", "claim"),
        ("POST", "/heartbeat", "write:service", "heartbeat"),
        ("POST", "/complete", "write:service", "complete"),
        ("POST", "/history", "write:service", "compare_history"),
        ("POST", "/fail", "write:service", "fail"),
    ),
)

_PAGES: Final = (
    *(_page(path, "api_page", OPEN) for path in API_PAGE_FILES),
    *(_page(path, "document", OPEN) for path in sorted(DOCUMENT_FILES)),
    _page("/openapi.json", "openapi", ANY_TOKEN),
)

_NOTHING: Final = (
    *unrouted("/...", "admin:*"),
    *unrouted(READY_PATH, ANY_TOKEN, about=True),
    *unrouted("/v1/status", "read:service", about=True),
    *unrouted("/v1/shards", "read:service", about=True),
    *unrouted("/v1/shards/targets", "read:service", about=True),
    *unrouted(METRICS_PATH, "read:service", about=True),
    *unrouted("/v1/lake/catalog", ANY_TOKEN),
    *unrouted("/docs", ANY_TOKEN),
    *unrouted("/openapi.json", ANY_TOKEN),
    *unrouted("/v1/databases", ANY_TOKEN),
    *unrouted("/v1/databases/{name}", "read:{name}.*", "admin:{name}.*"),
    *unrouted("/v1/tables", ANY_TOKEN),
    *unrouted("/v1/tables/{path}/...", "read:{path}", "admin:{path}"),
    *unrouted("/v1/tables/{path}/lookup/...", "read:{path}"),
    *unrouted("/v1/tables/{path}/prefix_lookup/...", "read:{path}"),
    *unrouted("/v1/tables/{path}/lake/...", "read:{path}"),
    *unrouted("/v1/tables/{path}/consumers/...", "read:{path}"),
    *unrouted("/v1/tables/{path}/append/...", "read:{path}", "write:{path}"),
    *unrouted("/v1/tables/{path}/upsert/...", "read:{path}", "write:{path}"),
    *unrouted("/v1/tables/{path}/delete/...", "read:{path}", "write:{path}"),
    *unrouted("/v1/tables/{path}/rejected/...", "read:{path}", "write:{path}"),
    *unrouted("/v1/tables/{path}/transactions/...", "read:{path}", "write:{path}"),
    *unrouted("/v1/tiering", "read:service", "write:service", about=True),
    *unrouted("/v1/tiering/...", "read:service", "write:service"),
    *unrouted("/v1/admin/...", "admin:service", about=True),
)

ROUTES: Final[Sequence[Route]] = (*_PROCESS, *_DATA, *_CONTROL, *_PAGES, *_NOTHING)


@dataclass(slots=True)
class _Node:
    """The rows of one path (`exact`) and of all longer paths (`below`) by method, and child nodes.

    The child nodes are either words or one parameter, so each path has a single way down the tree.
    """

    exact: dict[str, Route] = field(default_factory=dict)
    below: dict[str, Route] = field(default_factory=dict)
    words: dict[str, _Node] = field(default_factory=dict)
    parameter: tuple[str, _Node] | None = None

    def add(self, segments: list[str], route: Route) -> None:
        if not segments or segments == ["..."]:
            rows = self.below if segments else self.exact
            for method in route.method.split(", "):
                # The rows that answer come first in the table.
                rows.setdefault(method, route)
        elif segments[0].startswith("{"):
            name = segments[0].strip("{}")
            if self.parameter is None:
                self.parameter = (name, _Node())
            assert self.parameter[0] == name, route
            assert not self.words, route
            self.parameter[1].add(segments[1:], route)
        else:
            assert self.parameter is None, route
            self.words.setdefault(segments[0], _Node()).add(segments[1:], route)


class RouteTable:
    """Finds the row of a request."""

    def __init__(self, rows: Sequence[Route]) -> None:
        self.rows = rows
        self._root = _Node()
        for route in rows:
            self._root.add(route.path.split("/")[1:], route)
        # The last match that all longer paths share, with its method and the path up to there: the
        # next request is often for another row of the same table.
        self._last: tuple[str, str, RouteMatch] | None = None

    def find(self, method: str, path: str) -> RouteMatch:
        """Return the row of the exact path, else the row of the longest `...` prefix."""
        last = self._last
        if last is not None and method == last[0] and path.startswith(last[1]):
            return last[2]
        node = self._root
        parameters: dict[str, str] = {}
        route = _row(node.below, method)
        assert route is not None  # the last resort: every method below /
        # The target of `OPTIONS *` is no path: it has no slash.
        segments = path.split("/")[1:]
        for position, segment in enumerate(segments):
            following = node.words.get(segment)
            if following is None:
                if node.parameter is None:
                    match = RouteMatch(route, parameters)
                    if not node.words:
                        above = "/".join(["", *segments[:position], ""])
                        self._last = method, above, match
                    return match
                name, following = node.parameter
                parameters[name] = segment
            node = following
            if node.below:
                route = _row(node.below, method) or route
        if segments:
            route = _row(node.exact, method) or route
        return RouteMatch(route, parameters)

    def methods(self, path: str) -> list[str]:
        """Return the methods that the exact path answers."""
        node = self._root
        for segment in path.split("/")[1:]:
            following = node.words.get(segment)
            if following is None:
                if node.parameter is None:
                    return []
                following = node.parameter[1]
            node = following
        return sorted(
            method for method, row in node.exact.items() if row.answer is not Answer.NOTHING
        )


def _row(rows: Mapping[str, Route], method: str) -> Route | None:
    return rows.get(method) or rows.get(ANY)
