"""What a process answers that does not own its shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.door_table import doors_of
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s
from streamhouse.storage_service.ownership.roles.role import Lag, Role, Standing
from streamhouse.storage_service.server._front_app import FrontApp
from streamhouse.storage_service.server.http.http_exchange import Receive, Scope, Send
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.asgi_call import AsgiAnswer, AsgiCall

OWNER = "http://other:8765"


class _World:
    def __init__(self, data_dir: Path, **config: Any) -> None:
        self.standing = Standing("0")
        self.standing.role, self.standing.owner = Role.STANDBY, OWNER
        metrics = ServiceMetrics()

        async def read() -> Any:
            return self.standing.metrics()

        metrics.watch(read)
        self.app = FrontApp(
            ServiceConfig(data_dir=data_dir, **config),
            standing=self.standing,
            metrics=metrics,
            executor=Pool("rows", 1),
            doors=doors_of(ServiceConfig(data_dir=data_dir, kafka_port=0)),
        )

    async def get(self, path: str, **headers: str) -> AsgiAnswer:
        return await AsgiCall(self.app, "GET", path, headers=headers).run()


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OWNER])
async def test_health_is_fine_and_readiness_is_not_in_every_role(
    tmp_path: Path, role: Role
) -> None:
    world = _World(tmp_path)
    world.standing.role, world.standing.service_id = role, "of-all-shards"

    health, ready = await world.get("/health"), await world.get("/ready")

    assert (health.status, health.json()) == (
        200,
        {"status": "alive", "role": role, "service_id": "of-all-shards"},
    )
    assert (ready.status, ready.json()) == (503, {"status": role, "owner": OWNER})


async def test_who_shows_no_token_is_told_the_role_and_not_where_the_owner_is(
    tmp_path: Path,
) -> None:
    world = _World(tmp_path, token="t")

    bare = await world.get("/ready", host="10.0.0.7:8765")
    wrong = await world.get("/ready", authorization="Bearer x")
    right = await world.get("/ready", authorization="Bearer t")

    assert (bare.status, bare.json()) == (503, {"status": "standby"})
    assert wrong.status == 401
    assert (right.status, right.json()) == (503, {"status": "standby", "owner": OWNER})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tables"),
        ("POST", "/v1/tables/events/append"),
        ("GET", "/"),
        ("GET", "/v1/nothing"),
    ],
)
@pytest.mark.parametrize("owner", [OWNER, None])
async def test_everything_else_says_who_owns_the_data(
    tmp_path: Path, method: str, path: str, owner: str | None
) -> None:
    world = _World(tmp_path)
    world.standing.owner = owner

    answer = await AsgiCall(world.app, method, path, chunks=[b"x"]).run()

    assert answer.status == 421
    assert answer.json()["error"]["code"] == "not_owner"
    assert answer.json()["error"]["owner"] == owner


async def test_engines_that_know_no_owners_are_told_in_their_own_words(tmp_path: Path) -> None:
    world = _World(tmp_path)

    answer = await AsgiCall(world.app, "POST", "/iceberg/v1/namespaces", chunks=[b"x"]).run()

    assert answer.status == 503
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableException", 503)


async def test_metrics_say_the_role_and_how_far_behind_it_is(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.standing.lag = Lag(objects=3, since_s=boot_clock_s() - 1_500)

    text = (await world.get("/metrics")).body.decode()

    assert 'streamhouse_role{role="standby",shard="0"} 1.0' in text
    assert 'streamhouse_role{role="owner",shard="0"} 0.0' in text
    assert "streamhouse_standby_lag_objects 3.0" in text
    assert "streamhouse_standby_lag_seconds 150" in text


async def test_without_the_token_nobody_learns_who_owns_the_data(tmp_path: Path) -> None:
    world = _World(tmp_path, token="secret")

    for path in ("/metrics", "/v1/tables"):
        assert (await world.get(path)).status == 401
        assert (await world.get(path, authorization="Bearer secret")).status != 401
    assert (await world.get("/health")).status == 200


async def test_the_service_answers_once_the_shard_is_its_own(tmp_path: Path) -> None:
    world = _World(tmp_path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    world.app.hand_over(app)

    assert (await world.get("/v1/tables")).status == 204
