"""Catalogs behind the service that take requests and do not answer, and such that go in circles."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitStateUnknownException, ServiceUnavailableError
from pyiceberg.types import IntegerType

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import (
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from tests.support.flaky_proxy import FlakyProxy
from tests.support.free_ports import free_port
from tests.support.service_process import ServiceProcess
from tests.support.silent_server import SilentServer
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
SHORT = "--catalog-timeout-ms=700"


def _behind(uri: str) -> tuple[str, ...]:
    return f"--catalog-property=uri={uri}/iceberg", "--catalog-property=type=rest"


def _get(service: ServiceProcess, path: str) -> tuple[int, dict[str, Any]]:
    answer = urllib3.request(
        "GET", f"{service.endpoint}/iceberg/v1/{path}", retries=False, timeout=60
    )
    return answer.status, answer.json()


def test_threads_come_back_from_a_catalog_that_does_not_answer(tmp_path: Path) -> None:
    config = {"/iceberg/v1/config": {"defaults": {}, "overrides": {}}}
    with (
        SilentServer(config) as silent,
        ServiceProcess(
            tmp_path, SHORT, "--catalog-threads=2", *_behind(silent.endpoint)
        ) as service,
    ):
        answers: list[tuple[int, dict[str, Any]]] = []

        def ask() -> None:
            answers.append(_get(service, "namespaces"))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for status, answer in answers:
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableException")
            assert "did not answer within 0.7 s (catalog_timeout_ms)" in answer["error"]["message"]
        # All the rest goes on, and so does the end.
        assert _get(service, "config")[0] == 200
        with StreamhouseClient(service.endpoint) as client:
            client.create_table("t", SCHEMA)
            client.append("t", pa.table({"id": [1], "name": ["x"]}, schema=SCHEMA))
            with pytest.raises(UnavailableError, match="did not answer within"):
                tier_once(client)
        assert service.terminate() == 0


@dataclass
class Pair:
    """A service in front of another's catalog, which is asked through `proxy`."""

    front: ServiceProcess
    behind: ServiceProcess
    proxy: FlakyProxy

    def hold_after(self, pieces: int, answers: int = 1) -> None:
        """Let so many pieces of answers through, and keep back what comes then."""
        self.proxy.pieces_to_pass, self.proxy.answers_to_hold = pieces, answers

    def let_through(self) -> bool:
        """Hold nothing any more; return whether all of that was kept back."""
        was_held = self.proxy.answers_to_hold == 0
        self.proxy.pieces_to_pass = self.proxy.answers_to_hold = 0
        return was_held


@pytest.fixture(params=[pytest.param("direct", marks=pytest.mark.long), "service"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with (
        ServiceProcess(tmp_path / "behind") as behind,
        FlakyProxy(int(behind.endpoint.rpartition(":")[2])) as proxy,
        ServiceProcess(
            tmp_path / "front",
            *(SHORT, f"--catalog-access={request.param}", *_behind(proxy.endpoint)),
        ) as front,
    ):
        yield Pair(front, behind, proxy)


@contextlib.contextmanager
def _catalog(service: ServiceProcess) -> Iterator[Catalog]:
    uri = f"{service.endpoint}/iceberg"
    with contextlib.closing(load_catalog("c", type="rest", uri=uri)) as catalog:
        yield catalog


def test_a_commit_that_was_not_answered_in_time_may_have_landed(pair: Pair) -> None:
    outcomes, said = set(), list[str]()
    with _catalog(pair.front) as catalog, _catalog(pair.behind) as judge:
        judge.create_namespace("db")
        judge.create_table("db.t", SCHEMA)
        for pieces in range(6):
            table = catalog.load_table("db.t")
            pair.hold_after(pieces)
            outcome = "done"
            try:
                with table.update_schema() as update:
                    update.add_column(f"c{pieces}", IntegerType())
            except (CommitStateUnknownException, ServiceUnavailableError) as error:
                outcome = type(error).__name__
                said.append(str(error))
            pair.let_through()
            has = f"c{pieces}" in judge.load_table("db.t").schema().column_names
            # What is said to be done is, and what is said not to be is not.
            assert has or outcome != "done"
            assert not has or outcome != "ServiceUnavailableError"
            outcomes.add((outcome, has))

    assert all("did not answer within 0.7 s" in text for text in said)
    assert ("CommitStateUnknownException", True) in outcomes
    assert {outcome for outcome, _ in outcomes} >= {"done", "ServiceUnavailableError"}


def test_a_worker_whose_catalog_does_not_answer_tiers_each_row_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer is kept back at one place of a round after the other: also the commit's."""
    held = 0
    with StreamhouseClient(pair.front.endpoint) as client:
        client.create_database("shop")
        client.create_table("shop.t", SCHEMA)
        end = 0
        for pieces, answers in itertools.product(range(4), (1, 2)):
            rows = {"id": range(end, end + 10), "name": ["n"] * 10}
            client.append("shop.t", pa.table(rows, schema=SCHEMA))
            end += 10
            pair.hold_after(pieces, answers)
            # It tries a few times by itself.
            with contextlib.suppress(UnavailableError, UnknownOutcomeError):
                tier_once(client)
            held += pair.let_through()
            assert sorted(client.read("shop.t")["id"].to_pylist()) == list(range(end))
        tier_once(client)

        with _catalog(pair.behind) as judge:
            found = judge.load_table("shop.t").scan().to_arrow()["id"].to_pylist()
        assert sorted(found) == list(range(end))
        # Opening the catalog and the table, and the commit; then also when it looked for that.
        assert held >= 5
        assert "a commit may have landed (" in caplog.text
        assert "and the catalog cannot be asked" in caplog.text

        # A reader gives up as well.
        pair.hold_after(0)
        with pytest.raises(StreamhouseError, match="did not answer within"):
            client.read("shop.t")


def test_catalogs_that_lead_back_to_each_other_are_found_out(tmp_path: Path) -> None:
    port = free_port()
    a_uri = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        b = stack.enter_context(ServiceProcess(tmp_path / "b", *_behind(a_uri)))
        c = stack.enter_context(ServiceProcess(tmp_path / "c", *_behind(b.endpoint)))
        # Without a type: pyiceberg knows what it is.
        given = ("--port", str(port), f"--catalog-property=uri={c.endpoint}/iceberg")
        a = stack.enter_context(ServiceProcess(tmp_path / "a", *given))
        ids = {}
        for service in (a, b, c):
            with StreamhouseClient(service.endpoint) as client:
                ids[service.endpoint] = client.lake_catalog().properties["streamhouse.service-id"]
        through = (c, b, a)

        for position, service in enumerate(through):
            before, after = through[position - 1], through[(position + 1) % 3]
            status, answer = _get(service, "namespaces")
            assert status == 400
            own, first, second = (ids[s.endpoint] for s in (service, after, before))
            said = answer["error"]["message"]
            assert (
                f"the catalog of service {own} leads back to it, through {first}, {second}" in said
            )
            assert "give one of these services --catalog-property that lead elsewhere" in said
            # Each asks once, and nobody is busy with it afterwards.
            assert _get(service, "config")[0] == 200
