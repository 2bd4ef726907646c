"""What the server does around the REST catalog: grants, limits, errors in the protocol's form."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from streamhouse.storage_service.rest_catalog.rest_request import RestAnswer
from tests.support.held_step import around
from tests.support.in_process_service import in_process_service


async def test_an_unknown_path_is_answered_in_the_protocols_form(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        answer = await service.call("GET", "/iceberg/v2/config")
        assert answer.status == 404
        assert answer.json()["error"]["type"] == "NotFoundException"

        config = await service.call("GET", "/iceberg/v1/config")
        assert "POST /v1/{prefix}/transactions/commit" in config.json()["endpoints"]

        created = await service.call(
            "POST", "/iceberg/v1/namespaces", json_body={"namespace": ["db"]}
        )
        assert created.status == 200
        head = await service.call("HEAD", "/iceberg/v1/namespaces/other")
        assert (head.status, head.body) == (404, b"")
        head = await service.call("HEAD", "/iceberg/v1/namespaces/db")
        assert (head.status, head.body) == (204, b"")
        service.app.close()


async def test_a_slow_catalog_is_not_waited_for_by_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> RestAnswer:
        arrived.set()
        go_on.wait()
        return RestAnswer.of({})

    around(monkeypatch, "catalog-answering", slow)

    limits = {"catalog_threads": 1, "catalog_requests_max": 2}
    async with in_process_service(tmp_path, **limits) as service:
        waiting = [service.start("GET", "/iceberg/v1/config")[1] for _ in range(2)]
        await asyncio.to_thread(arrived.wait)

        refused = await service.call("GET", "/iceberg/v1/config")
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableException"
        # The event loop has all its time for others.
        assert (await service.call("GET", "/v1/tables")).status == 200

        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
        service.app.close()


async def test_a_bug_is_an_unknown_outcome_to_nobody_who_only_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> RestAnswer:
        raise RuntimeError("a bug")

    around(monkeypatch, "catalog-asked", broken)

    async with in_process_service(tmp_path) as service:
        read = await service.call("GET", "/iceberg/v1/namespaces/db")
        write = await service.call(
            "POST", "/iceberg/v1/namespaces/db/tables/t", json_body={"updates": []}
        )
        assert read.json()["error"]["type"] == "ServiceUnavailableException"
        assert (write.status, write.json()["error"]["type"]) == (
            500,
            "CommitStateUnknownException",
        )
        service.app.close()
