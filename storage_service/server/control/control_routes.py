"""Binds the functions of control routes to the rows of the table of routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Path, Request

from streamhouse.storage_service.server.http.http_exchange import unknown_parameter
from streamhouse.storage_service.server.routes import Answer, Route

__all__ = ["ControlRoutes", "TableName"]

TableName = Annotated[str, Path(description="`database.table`; `table` alone is in `default`.")]
_F = TypeVar("_F", bound=Callable[..., Any])


class ControlRoutes:
    """The control routes of one FastAPI application; `rows` is the table of routes."""

    def __init__(self, app: FastAPI, rows: Sequence[Route]) -> None:
        self._app = app
        self._unbound = {route.name: route for route in rows if route.answer is Answer.CONTROL}

    def answers(self, summary: str, *, status_code: int = 200) -> Callable[[_F], _F]:
        """Bind the decorated function to the route of the same name.

        Raises `KeyError` for an unknown or already bound name.
        """

        def bind(function: _F) -> _F:
            route = self._unbound.pop(function.__name__)
            self._app.add_api_route(
                route.path,
                function,
                methods=[route.method],
                summary=summary,
                status_code=status_code,
                tags=[route.tag],
                dependencies=[Depends(_check_parameters)],
            )
            return function

        return bind

    def check_complete(self) -> None:
        """Assert that every row has its function."""
        assert not self._unbound, f"nothing answers {sorted(self._unbound)}"


# A coroutine: FastAPI would run a plain function on a thread, for every request.
async def _check_parameters(request: Request) -> None:
    """Refuse a query parameter that the route does not have."""
    if not request.scope["query_string"]:
        return
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise unknown_parameter(request.url.path, name, known)
