"""docs/http_api.md says what the code does: every error and every route."""

from __future__ import annotations

import re
from pathlib import Path

from streamhouse.core.errors import InternalError, StreamhouseError
from streamhouse.storage_service.engine.tiering_desk import tiering_coordinator
from streamhouse.storage_service.server.routes import Answer
from tests.support.in_process_service import ROUTE_TABLE, in_process_service

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docs" / "http_api.md").read_text(encoding="utf-8")


def _classes(root: type[StreamhouseError]) -> list[type[StreamhouseError]]:
    return [root, *(c for child in root.__subclasses__() for c in _classes(child))]


def test_every_error_code_is_documented_with_its_status() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", TEXT, re.MULTILINE))

    assert documented == {
        (c.code, str(c.http_status), "yes" if c.retriable else "no")
        for c in {*_classes(StreamhouseError), InternalError}
    }


async def test_every_control_route_is_documented(tmp_path: Path) -> None:
    async def routes() -> set[str]:
        async with in_process_service(tmp_path) as service:
            paths = (await service.call("GET", "/openapi.json")).json()["paths"]
        described = {
            f"{method.upper()} {path}" for path, methods in paths.items() for method in methods
        }
        answered = {f"{r.method} {r.path}" for r in ROUTE_TABLE.rows if r.answer is Answer.PROCESS}
        return described | answered

    calls = ("heartbeat", "complete", "fail", "history")
    tiering = {f"POST /v1/tiering/{call}" for call in calls}
    documented = set(re.findall(r"`((?:GET|POST|PUT|DELETE|PATCH) /[^`?]*)`", TEXT))
    assert documented == await routes() - tiering


def test_every_reason_not_to_tier_is_documented() -> None:
    source = Path(tiering_coordinator.__file__).read_text(encoding="utf-8")
    reasons = set(re.findall(r'(?:return |reason, retry_ms = )\(?"([a-z_]+)"', source))

    assert len(reasons) == 8
    assert all(f"`{reason}`" in TEXT for reason in reasons)
