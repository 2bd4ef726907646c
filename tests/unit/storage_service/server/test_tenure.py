"""What a process answers when the data may be another one's by now: nothing of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.server.routes import Answer
from tests.support.in_process_service import (
    EVENTS,
    ROUTE_TABLE,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)

OWNER = "http://other:8765"


class _Tenure:
    """One that a test ends, at once or while the data is read."""

    def __init__(self, *, is_waited_for: bool = True) -> None:
        self.left: float = float("inf")
        self.is_waited_for = is_waited_for

    def end(self, *, after_checks: int = 0) -> None:
        self.left = after_checks

    def check(self) -> None:
        if self.left < 1:
            raise NotOwnerError("this process does not own the shard", owner=OWNER)
        self.left -= 1

    def check_write(self) -> None:
        if not self.is_waited_for:
            self.check()


KEYS = pa.record_batch([pa.array([1], pa.int64())], schema=pa.schema([EVENTS.field(0)]))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tables"),
        ("GET", "/v1/tables/events"),
        ("GET", "/v1/tables/nothing"),
        ("GET", "/v1/tables/events/state"),
        ("GET", "/v1/tables/events/buckets/0/fetch"),
        ("GET", "/v1/tables/events/subscribe"),
        ("GET", "/v1/tables/keyed/rows/1"),
        ("GET", "/v1/tables/keyed/rows/77"),
        ("GET", "/v1/tables/keyed/count"),
        ("GET", "/v1/databases"),
        ("GET", "/v1/lake/catalog"),
        ("GET", "/v1/tiering"),
        ("GET", "/ready"),
    ],
)
async def test_nothing_read_is_answered_after_its_end(
    tmp_path: Path, method: str, path: str
) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        tenure.end()

        answer = await service.call(method, path)

    assert answer.status == 421
    assert answer.json()["error"]["code"] == "not_owner"
    assert answer.json()["error"]["owner"] == OWNER


async def test_a_probe_without_a_token_sees_that_it_is_not_ready_after_its_end(
    tmp_path: Path,
) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure, token="t") as service:
        before = await service.call("GET", "/ready")
        tenure.end()

        after = await service.call("GET", "/ready")

    assert (before.status, before.json()) == (200, {"status": "ready"})
    assert (after.status, after.json()) == (503, {"status": "not_owner"})


async def test_a_lookup_is_refused_after_its_end(tmp_path: Path) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, KEYS.schema) as writer:
            writer.write_batch(KEYS)
        body = sink.getvalue().to_pybytes()
        before = await service.call("POST", "/v1/tables/keyed/lookup", body=body)
        tenure.end()

        answer = await service.call("POST", "/v1/tables/keyed/lookup", body=body)

    assert (before.status, answer.status) == (200, 421)


async def test_a_claim_of_a_round_is_refused_after_its_end(tmp_path: Path) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        tenure.end()

        answer = await service.call(
            "POST", "/v1/tiering/claim", json_body={"worker_id": "one", "force": True}
        )

    assert answer.status == 421


async def test_a_stored_write_is_answered_although_it_has_ended(tmp_path: Path) -> None:
    """What was stored is true whoever owns the data; `nothing was done` would be false."""
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        tenure.end()

        answer = await service.append([(0, 0, event_rows(3, 5))])

    assert answer.status == 200


@pytest.mark.parametrize("verb", ["append", "upsert"])
@pytest.mark.parametrize(("checks", "code"), [(0, "not_owner"), (1, "unknown_outcome")])
async def test_a_write_that_only_the_disk_has_is_not_acknowledged_after_its_end(
    tmp_path: Path, verb: str, checks: int, code: str
) -> None:
    """A zombie's disk is nobody's: what it stored on it is lost when it meets the seal."""
    tenure = _Tenure(is_waited_for=False)
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        path = {"append": "events", "upsert": "keyed"}[verb]
        before = (await service.call("GET", f"/v1/tables/{path}/state")).json()
        tenure.end(after_checks=checks)

        answer = await service.call(
            "POST",
            f"/v1/tables/{path}/{verb}",
            body=append_body(EVENTS, [(0, 0, event_rows(3, 5))]),
        )

        tenure.left = float("inf")
        after = (await service.call("GET", f"/v1/tables/{path}/state")).json()
    assert answer.json()["error"]["code"] == code
    # `not_owner` says that nothing was done.
    assert (after == before) == (code == "not_owner")


@pytest.mark.parametrize("key", [1, 77])
async def test_a_delete_that_found_nothing_is_a_read(tmp_path: Path, key: int) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        tenure.end()
        keys = pa.record_batch([pa.array([key], pa.int64())], schema=KEYS.schema)

        answer = await service.call(
            "POST", "/v1/tables/keyed/delete", body=append_body(KEYS.schema, [(0, 0, keys)])
        )

    assert answer.status == {1: 200, 77: 421}[key]


@pytest.mark.parametrize("name", ["n1", "new"])
async def test_an_upsert_that_found_its_rows_is_a_read_in_every_form(
    tmp_path: Path, name: str
) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        tenure.end()
        rows = [{"id": 1, "name": name}]

        answer = await service.call("POST", "/v1/tables/keyed/upsert", json_body=rows)

    assert answer.status == {"n1": 421, "new": 200}[name]


async def test_a_refused_write_may_be_right_elsewhere(tmp_path: Path) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        tenure.end()

        answer = await service.append([(0, 0, event_rows(3, 5))], path="made_meanwhile")

    assert answer.status == 421


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/status", "/", "/docs"])
async def test_a_process_tells_of_itself_after_its_end(tmp_path: Path, path: str) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        tenure.end()

        answer = await service.call("GET", path)

    assert answer.status == 200


async def test_a_subscription_is_cut_at_its_end(tmp_path: Path) -> None:
    tenure = _Tenure()
    async with in_process_service(tmp_path, tenure=tenure) as service:
        await _tables(service)
        call, answering = service.start("GET", "/v1/tables/events/subscribe")
        async with asyncio.timeout(60):
            while not call.answer.body:
                await asyncio.sleep(0.001)
        sent = len(call.answer.body)
        tenure.end()

        await service.append([(0, 0, event_rows(5, 7))])
        answer = await answering

    assert not answer.is_complete
    assert len(answer.body) == sent


def test_every_route_that_reads_is_a_read_and_no_other() -> None:
    named = {route.name: route.is_read for route in ROUTE_TABLE.rows if route.name}

    changing = {name for name, is_read in named.items() if not is_read}

    assert changing == {
        *("append", "upsert", "delete", "stage", "stage_backup", "discard_backup"),
        *("create_database", "drop_database", "create_table", "drop_table", "adopt"),
        "keep_rejected",
        *("move_table", "receive_table"),
        *("alter_properties", "alter_partitioning", "alter_schema"),
        *("begin_transaction", "commit_transaction", "abort_transaction", "complete"),
        *("health", "page", "status", "metrics"),
        *(route.name for route in ROUTE_TABLE.rows if route.answer is Answer.PAGES),
        *("iceberg", "schema_registry"),
    }


async def _tables(service: InProcessService) -> None:
    await service.create_table("events")
    await service.create_table("keyed", primary_key=("id",))
    assert (await service.append([(0, 0, event_rows(0, 3))])).status == 200
    upserted = await service.call(
        "POST", "/v1/tables/keyed/upsert", body=append_body(EVENTS, [(0, 0, event_rows(0, 3))])
    )
    assert upserted.status == 200, upserted.body
