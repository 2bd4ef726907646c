"""The page at /docs that describes and tries control routes, and the documents below /docs.

swagger-ui and the documents are packaged. The status page shows the documents.

The page loads all files from the service and works without the internet. The page has no secrets:
all requests use a token entered by the user.
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from streamhouse.storage_service.server.routes import API_PAGE_FILES, DOCUMENT_FILES

__all__ = ["api_page_routes"]

_CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
}
_HEADERS: Final = {
    # swagger-ui has inline styles, and pictures in its style sheet.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
        " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def api_page_routes(app: FastAPI) -> None:
    """Make the routes of the page, its files and the documents."""

    async def api_page(request: Request) -> Response:
        return _answer("swagger", API_PAGE_FILES[request.scope["path"]])

    async def document(request: Request) -> Response:
        return _answer("documents", DOCUMENT_FILES[request.scope["path"]])

    for paths, page in ((API_PAGE_FILES, api_page), (DOCUMENT_FILES, document)):
        for path in paths:
            app.add_route(path, page, methods=["GET"], include_in_schema=False)


def _answer(folder: str, name: str) -> Response:
    cache_control = "no-cache" if name.endswith("html") else "max-age=3600"
    return Response(
        _file(folder, name),
        media_type=_CONTENT_TYPES[name.rpartition(".")[2]],
        headers={**_HEADERS, "Cache-Control": cache_control},
    )


@functools.cache
def _file(folder: str, name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath(folder, name).read_bytes()
