"""The routes of lake pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_service import InProcessService, in_process_service

PINS = "/v1/tables/events/lake/pins"


def _holders(answer: Any) -> dict[str, str]:
    return {pin["holder"]: pin["snapshot_id"] for pin in answer.json()["pins"]}


async def _pin(service: InProcessService, holder: str, body: Any) -> Any:
    return await service.call("PUT", f"{PINS}/{holder}", json_body=body)


async def test_a_snapshot_is_pinned_listed_and_let_go(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        assert (await service.call("GET", PINS)).json() == {"pins": []}

        pin = await _pin(service, "q:1", {"snapshot_id": "5781947118336215154", "ttl_ms": 1000})
        assert pin.status == 200
        assert pin.json().keys() == {"holder", "snapshot_id", "expires_timestamp_us"}
        assert (await _pin(service, "q-2", {"snapshot_id": 7, "ttl_ms": 60_000})).status == 200
        # Renewed, because a second is soon over.
        await _pin(service, "q:1", {"snapshot_id": "5781947118336215154", "ttl_ms": 60_000})

    async with in_process_service(tmp_path) as service:
        listed = await service.call("GET", PINS)
        assert _holders(listed) == {"q:1": "5781947118336215154", "q-2": "7"}
        assert (await service.call("DELETE", f"{PINS}/q-2")).status == 204
        assert (await service.call("DELETE", f"{PINS}/q-2")).status == 204
        assert _holders(await service.call("GET", PINS)) == {"q:1": "5781947118336215154"}
        await service.call("DELETE", "/v1/tables/events")
        await service.create_table()
        assert _holders(await service.call("GET", PINS)) == {}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"snapshot_id": "x", "ttl_ms": 1}, "body.snapshot_id"),
        ({"snapshot_id": "1"}, "body.ttl_ms"),
        ({"snapshot_id": "1", "ttl_ms": 0}, "a lake pin lasts from 1 ms"),
        ({"snapshot_id": "1", "ttl_ms": 1, "other": 1}, "body.other"),
    ],
)
async def test_a_wrong_pin_is_refused(tmp_path: Path, body: Any, message: str) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        status, code, text = (await _pin(service, "a", body)).error()[:3]
        assert (status, code) == (400, "invalid_request")
        assert message in text
        assert _holders(await service.call("GET", PINS)) == {}


async def test_a_table_that_does_not_exist_has_no_pins(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        assert (await service.call("GET", PINS)).error()[:2] == (404, "table_not_found")
