"""Who gets the secrets of the lake, and whose pins are whose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from streamhouse.core.secret_sources import WITHHELD_PROPERTY
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.in_process_service import InProcessService, in_process_service

OWNER_TOKEN = "owner-token"
SECRETS = {
    "s3.access-key-id": "AKIA-hush",
    "s3.secret-access-key": "hush-key",
    "s3.proxy-uri": "http://me:hush-proxy@proxy:1",
    "my.api-token": "hush-token",
}
OPEN = {"s3.region": "eu-central-1", "s3.endpoint": "http://127.0.0.1:9"}


@contextlib.asynccontextmanager
async def _service(
    tmp_path: Path,
    **tokens: list[str],
) -> AsyncIterator[InProcessService]:
    grants = tmp_path / "grants.toml"
    grants.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\n'
            f"grants = {json.dumps(granted)}\n"
            for name, granted in tokens.items()
        )
    )
    grants.chmod(0o600)

    async with in_process_service(
        tmp_path / "data",
        token=OWNER_TOKEN,
        grants_file=grants,
        catalog_properties={**SECRETS, **OPEN},
    ) as service:
        yield service


async def _as(service: InProcessService, token: str, method: str, path: str, **more: Any) -> Any:
    headers = {"authorization": f"Bearer {token}", **more.pop("headers", {})}
    return await service.call(method, path, headers=headers, **more)


async def test_only_who_may_read_the_lake_gets_its_secrets(tmp_path: Path) -> None:
    async with _service(
        tmp_path,
        lake=["read:sales.orders", "read:lake"],
        everything=["read:*"],
        reader=["read:sales.orders"],
        worker=["write:service", "read:sales.*"],
        admin=["admin:sales.*", "admin:service"],
        watcher=["admin:service"],
        nobody=[],
    ) as service:
        for token in (OWNER_TOKEN, "lake", "everything"):
            answer = await _as(service, token, "GET", "/v1/lake/catalog")
            assert answer.json()["properties"].items() >= {**SECRETS, **OPEN}.items()
            assert WITHHELD_PROPERTY not in answer.json()["properties"]
        for token in ("reader", "worker", "admin"):
            answer = await _as(service, token, "GET", "/v1/lake/catalog")
            assert b"hush" not in answer.body
            properties = answer.json()["properties"]
            assert properties.items() >= OPEN.items()
            assert properties["s3.proxy-uri"] == "http://me@proxy:1"
            assert properties[WITHHELD_PROPERTY] == ", ".join(sorted(SECRETS))
        for token in ("watcher", "nobody"):
            answer = await _as(service, token, "GET", "/v1/lake/catalog")
            assert answer.error() == (
                403,
                "forbidden",
                f"token '{token}' has no grant on any table",
            )


async def test_the_rest_catalog_vends_them_to_nobody_else(tmp_path: Path) -> None:
    schema = {"type": "struct", "schema-id": 0, "fields": []}

    async with _service(
        tmp_path, lake=["read:sales.*", "read:lake"], reader=["admin:sales.*", "read:service"]
    ) as service:
        base = "/iceberg/v1/namespaces"
        wants = {"x-iceberg-access-delegation": "vended-credentials"}
        made = await _as(
            service, OWNER_TOKEN, "POST", base, json_body={"namespace": ["sales"], "properties": {}}
        )
        assert made.status == 200, made.body
        made = await _as(
            service,
            OWNER_TOKEN,
            "POST",
            f"{base}/sales/tables",
            json_body={"name": "orders", "schema": schema},
            headers=wants,
        )
        assert made.status == 200, made.body
        table = f"{base}/sales/tables/orders"
        for token in ("lake", "reader"):
            loaded = await _as(service, token, "GET", table, headers=wants)
            assert loaded.status == 200
            assert loaded.json()["config"]["s3.region"] == "eu-central-1"
            assert (b"hush" in loaded.body) == (token == "lake")
        asked = await _as(service, "lake", "GET", f"{table}/credentials")
        assert (
            asked.json()["storage-credentials"][0]["config"].items()
            >= {"s3.secret-access-key": "hush-key"}.items()
        )
        for tables in (table, table.replace("/v1/", "/v1/live/")):
            for token, headers in (("lake", wants), ("lake", {}), ("reader", wants)):
                planned = await _as(
                    service, token, "POST", f"{tables}/plan", json_body={}, headers=headers
                )
                assert planned.status == 200, planned.body
                credentials = planned.json().get("storage-credentials")
                if (token, headers) == ("lake", wants):
                    assert credentials == asked.json()["storage-credentials"]
                else:
                    assert not credentials
                    assert b"hush" not in planned.body
        refused = await _as(service, "reader", "GET", f"{table}/credentials")
        assert refused.status == 403
        assert "no grant 'read:lake'" in refused.body.decode()
        for path in ("/iceberg/v1/config", table, "/v1/tables", "/metrics", "/v1/status"):
            assert b"hush" not in (await _as(service, "reader", "GET", path)).body


async def test_a_pin_is_changed_and_ended_by_its_own_token_or_an_administrator(
    tmp_path: Path,
) -> None:
    pins = "/v1/tables/events/lake/pins"

    async def listed(service: InProcessService, token: str) -> dict[str, str]:
        answer = await _as(service, token, "GET", pins)
        return {pin["holder"]: pin["snapshot_id"] for pin in answer.json()["pins"]}

    async def pin(service: InProcessService, token: str, holder: str, snapshot_id: int) -> None:
        body = {"snapshot_id": str(snapshot_id), "ttl_ms": 60_000}
        answer = await _as(service, token, "PUT", f"{pins}/{holder}", json_body=body)
        assert answer.status == 200
        assert answer.json().keys() == {"holder", "snapshot_id", "expires_timestamp_us"}

    async with _service(
        tmp_path,
        alice=["read:default.events"],
        bob=["read:default.*"],
        admin=["read:*", "admin:service"],
    ) as service:
        created = await _as(
            service,
            OWNER_TOKEN,
            "POST",
            "/v1/tables",
            json_body={"path": "events", "schema": [{"name": "id", "type": "bigint"}]},
        )
        assert created.status == 201
        await pin(service, "alice", "secret-query", 1)
        await pin(service, "bob", "mine", 2)
        # Whoever knows or guesses the name gets one of their own, and ends nothing else.
        await pin(service, "bob", "secret-query", 3)
        assert await listed(service, "bob") == {
            "(hidden 1)": "1", "mine": "2", "secret-query": "3",
        }  # fmt: skip
        for _ in range(2):
            assert (await _as(service, "bob", "DELETE", f"{pins}/secret-query")).status == 204
        assert await listed(service, "alice") == {"secret-query": "1", "(hidden 2)": "2"}

        # Maintenance sees them all, and an administrator may end one.
        assert await listed(service, "admin") == {"secret-query": "1", "mine": "2"}
        assert (await _as(service, "admin", "DELETE", f"{pins}/secret-query")).status == 204
        assert await listed(service, "admin") == {"mine": "2"}
