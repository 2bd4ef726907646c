"""The REST catalog over a tiered lake, and pyiceberg's REST client on it without a socket."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from requests import PreparedRequest, Response, Session
from requests.adapters import BaseAdapter

from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.model.lake import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.storage_service.rest_catalog.live_tables import LiveTable
from streamhouse.storage_service.rest_catalog.rest_api import RestCatalogApi
from streamhouse.storage_service.rest_catalog.rest_request import RestRequest
from streamhouse.storage_service.server.iceberg_errors import iceberg_error
from tests.support.fake_tiering_service import FakeTieringService
from tests.support.tiering_world import TieringWorld

__all__ = ["MemoryRestCatalog", "RestWorld"]

_ENDPOINT = "http://memory/iceberg"


class FakeLiveTables:
    """The tables of the service in memory, as the REST catalog asks for them."""

    def __init__(self, service: FakeTieringService, service_id: str) -> None:
        self._service = service
        self.service_id = service_id
        self.pinned: dict[str, int] = {}

    def with_id(self, table_id: int) -> LiveTable | None:
        for path in self._service.list_tables():
            if self._service.describe_table(path).table_id == table_id:
                return self.named(path)
        return None

    def named(self, path: str) -> LiveTable | None:
        try:
            state = self._service.table_state(path)
        except StreamhouseError:
            return None
        return LiveTable(
            info=state.table,
            lake=state.lake,
            high_watermarks={b: p.high_watermark for b, p in state.positions.items()},
            pinned=self.pinned,
        )


class RestWorld(TieringWorld):
    """A tiering world whose catalog is served by a `RestCatalogApi`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tables = FakeLiveTables(self.service, self.catalog.properties[SERVICE_ID_PROPERTY])
        self.api = RestCatalogApi(self.catalog, service_id=self.tables.service_id)
        MemoryRestCatalog.world = self

    def __exit__(self, *error: Any) -> None:
        self.api.close()
        super().__exit__(*error)

    def client(self) -> RestCatalog:
        """pyiceberg's REST client on the served catalog."""
        return MemoryRestCatalog("rest", uri=_ENDPOINT)

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
        judge = load_catalog(self.catalog.name, **self.catalog.properties)
        assert isinstance(judge, SqlCatalog)
        self._judge = judge
        self.catalog = LakeCatalog(
            name=self.catalog.name,
            properties={
                "py-catalog-impl": f"{__name__}.{MemoryRestCatalog.__name__}",
                "uri": _ENDPOINT,
                SERVICE_ID_PROPERTY: self.tables.service_id,
            },
        )


class MemoryRestCatalog(RestCatalog):
    """A REST catalog whose requests go straight into the newest `RestWorld`."""

    world: RestWorld

    def _create_session(self) -> Session:
        session = super()._create_session()
        session.mount("http://memory", _Adapter(MemoryRestCatalog.world))
        return session


class _Adapter(BaseAdapter):
    def __init__(self, world: RestWorld) -> None:
        super().__init__()
        self._world = world

    def send(self, request: PreparedRequest, *_: Any, **__: Any) -> Response:
        assert request.url is not None
        assert request.method is not None
        path = request.url.removeprefix(f"{_ENDPOINT}/v1/")
        body = json.loads(request.body) if request.body else None
        status, value = self._world.call(request.method, path, body)
        response = Response()
        response.status_code = status
        response.request, response.url = request, request.url
        response.raw = io.BytesIO(b"" if status == 204 else json.dumps(value).encode())
        return response

    def close(self) -> None:
        pass
