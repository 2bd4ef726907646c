"""The page at /docs: all that it loads is here, and its policy lets it load nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from streamhouse.storage_service.server.routes import API_PAGE_FILES
from tests.support.in_process_service import in_process_service


async def test_the_page_and_all_that_it_loads_are_answered_here(tmp_path: Path) -> None:
    known = {"authorization": "Bearer secret"}
    async with in_process_service(tmp_path, token="secret") as service:
        page = await service.call("GET", "/docs")
        loaded = re.findall(r'(?:src|href)="([^"]*)"', page.body.decode())
        files = {path: await service.call("GET", path) for path in loaded}
        spec = await service.call("GET", "/openapi.json", headers=known)
        refused = await service.call("GET", "/openapi.json")
        head = await service.call("HEAD", "/docs")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert set(loaded) | {"/docs"} == set(API_PAGE_FILES)
    assert {answer.status for answer in files.values()} == {200}
    assert b"SwaggerUIBundle" in files["/docs/swagger-ui-bundle.js"].body
    assert (refused.status, head.status) == (401, 200)
    # Swagger UI shows versions 3.0 and 3.1.
    assert spec.json()["openapi"].startswith("3.1")


async def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        answers = {path: await service.call("GET", path) for path in API_PAGE_FILES}

    for answer in answers.values():
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
    page = answers["/docs"].body
    # The policy refuses scripts that stand in the page.
    assert re.findall(rb"<script[^>]*>(.+?)</script>", page) == []
    assert b"://" not in page
