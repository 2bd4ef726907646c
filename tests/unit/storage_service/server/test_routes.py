"""The table of routes: every row is reached, has a need, and is all that FastAPI answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route as StarletteRoute

from streamhouse.core.errors import InvalidNameError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.door_table import doors_of
from streamhouse.storage_service.server._app import DATA_ANSWERS
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.control._control_plane import build_control_plane
from streamhouse.storage_service.server.routes import (
    OPEN,
    OPEN_PAGES,
    ROUTES,
    Answer,
    Route,
    RouteTable,
)
from tests.support.in_process_service import ROUTE_TABLE, in_process_service

ANSWERING = [route for route in ROUTE_TABLE.rows if route.answer is not Answer.NOTHING]


def _filled(path: str) -> str:
    """A path with something in place of its parameters."""
    return re.sub(r"\{\w+\}", "sales", path.removesuffix("/..."))


@pytest.mark.parametrize("route", ANSWERING, ids=lambda route: f"{route.method} {route.path}")
def test_a_request_of_a_row_finds_it(route: Route) -> None:
    for method in ("PUT",) if route.method == "*" else route.method.split(", "):
        assert ROUTE_TABLE.find(method, _filled(route.path)).route is route


def test_only_what_is_nobodys_secret_asks_for_no_token() -> None:
    assert {route.path for route in ROUTE_TABLE.rows if route.need == OPEN} == {
        "/health",
        *OPEN_PAGES,
    }


def test_a_full_service_says_that_kafka_is_not_served(tmp_path: Path) -> None:
    """A shard takes any other answer of another shard for a failure, and keeps asking."""
    for config in (ServiceConfig(data_dir=tmp_path, kafka_port=port) for port in (0, None)):
        match = doors_of(config).routes.find("GET", "/v1/kafka/topics")
        assert match.route.is_about_service


def test_every_data_route_has_one_answer() -> None:
    names = [route.name for route in ROUTE_TABLE.rows if route.answer is Answer.DATA]

    assert sorted(names) == sorted(DATA_ANSWERS)


async def test_fastapi_answers_the_rows_of_the_table_and_nothing_else(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        of_doors = [door.control_routes for door in service.doors]
        app = build_control_plane(service.service, ROUTE_TABLE.rows, of_doors)

    answered = {
        (method, route.path, route.name)
        for route in app.routes
        if isinstance(route, StarletteRoute)
        for method in route.methods or ()
    }
    assert answered == {
        (method, route.path, route.name)
        for route in ROUTE_TABLE.rows
        if route.answer in (Answer.CONTROL, Answer.PAGES)
        for method in route.method.split(", ")
    }
    by_fastapi = [row for row in ROUTE_TABLE.rows if row.answer in (Answer.CONTROL, Answer.PAGES)]
    assert len(app.routes) == len(by_fastapi)


def test_parameters_are_what_stands_between_slashes() -> None:
    found = ROUTE_TABLE.find("POST", "/v1/tables/a.b/transactions/7/stage")

    assert found.route.name == "stage"
    assert found.parameters == {"path": "a.b", "transaction_id": "7"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/tables/t/append"),
        ("POST", "/v1/tables/t/append/"),
        ("POST", "/v1/tables/t/append/more"),
        ("POST", "/V1/tables/t/append"),
        ("HEAD", "/v1/tables/t/count"),
        ("OPTIONS", "*"),
        ("GET", "v1/tables/t/count"),
    ],
)
def test_what_is_nearly_a_route_is_none(method: str, path: str) -> None:
    assert ROUTE_TABLE.find(method, path).route.answer is Answer.NOTHING


def test_a_path_that_can_be_no_tables_is_refused() -> None:
    with pytest.raises(InvalidNameError):
        ROUTE_TABLE.find("GET", "/v1/tables/not a name/state").need()


@pytest.mark.parametrize(
    ("method", "path", "level", "scope"),
    [
        ("GET", "/v1/tables/t", Level.READ, "default.t"),
        ("GET", "/v1/tables/t/transactions", Level.READ, "default.t"),
        ("POST", "/v1/tables/t/transactions", Level.WRITE, "default.t"),
        ("POST", "/v1/tables/t/transactions/1/commit", Level.WRITE, "default.t"),
        ("PUT", "/v1/tables/t/lake/pins/me", Level.READ, "default.t"),
        ("PUT", "/v1/tables/t/consumers/me", Level.READ, "default.t"),
        ("POST", "/v1/tables/t/something_new", Level.ADMIN, "default.t"),
        ("POST", "/v1/tiering/claim", Level.WRITE, "service"),
        ("POST", "/v1/admin/backup", Level.ADMIN, "service"),
        ("GET", "/something_new", Level.ADMIN, "*"),
        ("GET", "/iceberg/v1/config", Level.READ, None),
        ("GET", "/iceberg/v1/namespaces", Level.READ, None),
        ("POST", "/iceberg/v1/namespaces", Level.WRITE, "*"),
        ("POST", "/iceberg/v1/transactions/commit", Level.WRITE, "*"),
        ("POST", "/iceberg/v1/tables/rename", Level.ADMIN, "*"),
        ("DELETE", "/iceberg/v1/namespaces/db", Level.ADMIN, "db.*"),
        ("GET", "/iceberg/v1/namespaces/db/tables", Level.READ, "db.*"),
        ("POST", "/iceberg/v1/namespaces/db/register", Level.ADMIN, "db.*"),
        ("HEAD", "/iceberg/v1/namespaces/db/tables/t", Level.READ, "db.t"),
        ("POST", "/iceberg/v1/namespaces/db/tables/t", Level.WRITE, "db.t"),
        ("POST", "/iceberg/v1/namespaces/db/tables/t/metrics", Level.READ, "db.t"),
        ("GET", "/iceberg/v1/namespaces/db/tables/t/credentials", Level.READ, "lake"),
        ("DELETE", "/iceberg/v1/namespaces/db/tables/t", Level.ADMIN, "db.t"),
        ("GET", "/iceberg/v1/live/namespaces", Level.READ, None),
        ("GET", "/iceberg/v1/live/namespaces/db/tables", Level.READ, "db.*"),
        ("GET", "/iceberg/v1/live/namespaces/db/tables/t", Level.READ, "db.t"),
        ("GET", "/iceberg/v1/live/namespaces/db/tables/t/credentials", Level.READ, "lake"),
        ("GET", "/iceberg/v1/namespaces/live/tables/t", Level.READ, "live.t"),
    ],
)
def test_what_a_route_needs(method: str, path: str, level: Level, scope: str | None) -> None:
    need = ROUTE_TABLE.find(method, path).need()

    assert (need.level, need.scope) == (level, scope)


_SEGMENTS = ("v1", "tables", "a.b", "t", "rows", "1", "", "count", "lookup", "subscribe", "x")
_PATHS = st.lists(st.sampled_from(_SEGMENTS), max_size=7).map(lambda names: "/" + "/".join(names))
_ROW_PATHS = st.sampled_from(("/v1/tables/t/rows", "/v1/tables/t/rows/", "/v1/tables/t/rows/1"))


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(("GET", "POST", "HEAD")), st.one_of(_PATHS, _ROW_PATHS)),
        max_size=12,
    )
)
def test_earlier_requests_change_no_match(requests: list[tuple[str, str]]) -> None:
    table = RouteTable(ROUTES)
    for method, path in requests:
        table.find(method, path)
        table.find(method, f"{path}/more")
        assert table.find(method, path) == RouteTable(ROUTES).find(method, path)
