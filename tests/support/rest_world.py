"""The REST catalog over a tiered lake, and pyiceberg's REST client on it without a socket.

`RestWorld` is over a SQL catalog, `FrontWorld` over the REST catalog of another world.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table, Transaction
from pyiceberg.types import LongType
from requests import ConnectionError as ConnectionLost
from requests import PreparedRequest, Response, Session
from requests.adapters import BaseAdapter

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.storage_service.catalog_door.catalog_door import iceberg_error
from streamhouse.storage_service.rest_catalog.rest_api import RestCatalogApi
from streamhouse.storage_service.rest_catalog.rest_request import RestRequest
from tests.support.fake_service import FakeService
from tests.support.tiering_world import TieringWorld

__all__ = [
    "FakeServedTables",
    "FrontWorld",
    "MemoryRestCatalog",
    "RestWorld",
    "adding_column",
    "change_of",
]


Answer = tuple[int | None, Any]
"""A status, None for a connection that breaks, and JSON or a text that is none."""

# Who answers at a host: the newest world of each name.
_HOSTS: dict[str, Callable[[str, str, Any], Answer]] = {}


def _uri(host: str) -> str:
    return f"http://{host}/iceberg"


class FakeServedTables:
    """The tables of the service in memory, as the REST catalog asks for them."""

    def __init__(self, service: FakeService, service_id: str) -> None:
        self._service = service
        self.service_id = service_id
        self.pinned: set[int] = set()

    def with_id(self, table_id: int) -> ServedTable | None:
        for path in self._service.list_tables():
            if self._service.describe_table(path).table_id == table_id:
                return self.named(path)
        return None

    def named(self, path: str) -> ServedTable | None:
        try:
            state = self._service.table_state(path)
        except StreamhouseError:
            return None
        return ServedTable(
            info=state.table,
            lake=state.lake,
            positions=state.positions,
            pinned=self.pinned,
        )


class RestWorld:
    """The catalog of a tiering world, served by a `RestCatalogApi`. Closed by `with`."""

    def __init__(self, world: TieringWorld, *, host: str = "memory") -> None:
        self.world = world
        self.host = host
        self.tables = FakeServedTables(world.service, world.catalog.properties[SERVICE_ID_PROPERTY])
        self.reopen()
        _HOSTS[host] = self.call

    def __enter__(self) -> RestWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.api.close()

    def reopen(self) -> None:
        """Open the catalog anew, as after a restart."""
        if hasattr(self, "api"):
            self.api.close()
        self.api = RestCatalogApi(self.world.catalog, service_id=self.tables.service_id)

    def client(self, **properties: str) -> RestCatalog:
        """pyiceberg's REST client on the served catalog."""
        return MemoryRestCatalog("rest", uri=_uri(self.host), **properties)

    def call(
        self, method: str, path: str, body: Any = None, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        """One request below `/iceberg/v1/`, answered with status and JSON."""
        parts = urlsplit(path)
        request = RestRequest(
            method=method,
            segments=tuple(unquote(part) for part in parts.path.split("/")),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            body=b"" if body is None else json.dumps(body).encode(),
            **more,
        )
        try:
            answer = self.api.answer(request, self.tables)
        except StreamhouseError as error:
            return iceberg_error(error)
        return answer.status, json.loads(answer.body or b"{}")

    def serve_tiering_through_rest(self) -> None:
        """Make workers from here on go through the REST catalog, as `--catalog-access service`.

        What the lake holds is still judged by the catalog behind it.
        """
        judge = load_catalog(self.world.catalog.name, **self.world.catalog.properties)
        assert isinstance(judge, SqlCatalog)
        self.world._judge = judge
        self.world.catalog = LakeCatalog(
            name=self.world.catalog.name,
            properties={
                "py-catalog-impl": f"{__name__}.{MemoryRestCatalog.__name__}",
                "uri": _uri(self.host),
                SERVICE_ID_PROPERTY: self.tables.service_id,
            },
        )


class FrontWorld:
    """A service, `rest`, whose catalog is the REST catalog of `behind`, asked with `token`.

    `requests` are what reaches it, as `GET config`; `instead` has answers by path that it does not
    give itself, `before` what happens just before it is asked.
    """

    def __init__(self, behind: RestWorld, *, token: str) -> None:
        _HOSTS["behind"] = self._ask_behind
        self.behind = behind
        self.requests: list[str] = []
        self.instead: dict[str, Answer] = {}
        self.before: dict[str, Callable[[], Any]] = {}
        self.is_answer_lost = False
        described = LakeCatalog(
            name="front",
            properties={
                "py-catalog-impl": f"{__name__}.{MemoryRestCatalog.__name__}",
                "uri": _uri("behind"),
                "token": token,
                SERVICE_ID_PROPERTY: "fedcba9876543210",
            },
        )
        with contextlib.ExitStack() as opened:
            world = opened.enter_context(TieringWorld(behind.world.folder, catalog=described))
            self.rest = opened.enter_context(RestWorld(world, host="front"))
            self._opened = opened.pop_all()

    def __enter__(self) -> FrontWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def _ask_behind(self, method: str, path: str, body: Any) -> Answer:
        bare = path.partition("?")[0]
        self.requests.append(f"{method} {bare}")
        if method == "POST" and bare in self.before:
            self.before.pop(bare)()
        if (method == "POST" or bare == "config") and bare in self.instead:
            return self.instead[bare]
        answer = self.behind.call(method, path, body)
        return (None, "lost") if method == "POST" and self.is_answer_lost else answer


class MemoryRestCatalog(RestCatalog):
    """A REST catalog whose requests go straight into the newest world of the host's name."""

    def _create_session(self) -> Session:
        session = super()._create_session()
        host = urlsplit(self.uri).netloc
        session.mount(f"http://{host}", _Adapter(host, _HOSTS[host]))
        return session


class _Adapter(BaseAdapter):
    def __init__(self, host: str, ask: Callable[[str, str, Any], Answer]) -> None:
        super().__init__()
        self._host, self._ask = host, ask

    def send(self, request: PreparedRequest, *_: Any, **__: Any) -> Response:
        assert request.url is not None
        assert request.method is not None
        path = request.url.removeprefix(f"{_uri(self._host)}/v1/")
        body = json.loads(request.body) if request.body else None
        status, value = self._ask(request.method, path, body)
        if status is None:
            raise ConnectionLost(value)
        response = Response()
        response.status_code = status
        response.request, response.url = request, request.url
        text = value if isinstance(value, str) else json.dumps(value)
        response.raw = io.BytesIO(b"" if status == 204 else text.encode())
        return response

    def close(self) -> None:
        pass


def change_of(table: Table, transaction: Transaction) -> dict[str, Any]:
    """What `transaction` does to `table`, as one of the `table-changes`."""
    *namespace, name = table.name()
    return {
        "identifier": {"namespace": namespace, "name": name},
        "requirements": [
            r.model_dump(mode="json", by_alias=True) for r in transaction._requirements
        ],
        "updates": [u.model_dump(mode="json", by_alias=True) for u in transaction._updates],
    }


def adding_column(catalog: Catalog, path: str, column: str) -> dict[str, Any]:
    """The change of a table that gets a column of longs."""
    table = catalog.load_table(path)
    transaction = table.transaction()
    with transaction.update_schema() as update:
        update.add_column(column, LongType())
    return change_of(table, transaction)
