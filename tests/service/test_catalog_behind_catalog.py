"""A service whose catalog is the REST catalog of another service: tiering, and commits of several
tables, through both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table

from streamhouse.api.client import StreamhouseClient
from tests.support.flaky_proxy import FlakyProxy
from tests.support.rest_world import adding_column, change_of
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TOKEN, TOKEN_BEHIND = "token-of-the-front", "token-of-the-one-behind"


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


@dataclass
class Pair:
    """Both services; what the front asks the one behind goes through `proxy`."""

    front: ServiceProcess
    behind: ServiceProcess
    proxy: FlakyProxy
    client: StreamhouseClient

    def post(self, changes: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        answer = urllib3.request(
            "POST",
            f"{self.front.endpoint}/iceberg/v1/transactions/commit",
            json={"table-changes": changes},
            headers={"authorization": f"Bearer {TOKEN}"},
            retries=False,
            timeout=60,
        )
        return answer.status, json.loads(answer.data or b"{}")

    @contextlib.contextmanager
    def catalog(self) -> Iterator[Catalog]:
        uri = f"{self.front.endpoint}/iceberg"
        with contextlib.closing(load_catalog("f", type="rest", uri=uri, token=TOKEN)) as opened:
            yield opened

    @contextlib.contextmanager
    def judge(self) -> Iterator[Catalog]:
        """The catalog behind, asked directly."""
        uri = f"{self.behind.endpoint}/iceberg"
        opened = load_catalog("b", type="rest", uri=uri, token=TOKEN_BEHIND)
        with contextlib.closing(opened):
            yield opened


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    for name, token in (("front", TOKEN), ("behind", TOKEN_BEHIND)):
        (folder / f"{name}.token").write_text(token)
        (folder / f"{name}.token").chmod(0o600)
    with contextlib.ExitStack() as stack:
        behind = stack.enter_context(
            ServiceProcess(folder / "behind", f"--token-file={folder / 'behind.token'}")
        )
        proxy = stack.enter_context(FlakyProxy(int(behind.endpoint.rpartition(":")[2])))
        front = stack.enter_context(
            ServiceProcess(
                folder / "front",
                *(f"--token-file={folder / 'front.token'}", "--catalog-access=service"),
                *("--catalog-property=type=rest", f"--catalog-property=token={TOKEN_BEHIND}"),
                f"--catalog-property=uri={proxy.endpoint}/iceberg",
            )
        )
        client = stack.enter_context(StreamhouseClient(front.endpoint, token=TOKEN))
        client.create_database("shop")
        yield Pair(front, behind, proxy, client)


def _tiered(pair: Pair, *paths: str) -> None:
    for path in paths:
        pair.client.create_table(path, SCHEMA, bucket_count=2)
        pair.client.append(path, _rows(0, 100))
        assert tier_once(pair.client, path, token=TOKEN) == 100


def _deletion(table: Table, below: int) -> dict[str, Any]:
    transaction = table.transaction()
    transaction.delete(f"id < {below}")
    return change_of(table, transaction)


def _counts(pair: Pair, *paths: str) -> list[int]:
    with pair.judge() as judge:
        return [judge.load_table(path).scan().to_arrow().num_rows for path in paths]


def test_two_tables_lose_rows_in_one_commit_and_tiering_goes_on(pair: Pair) -> None:
    paths = ("shop.a", "shop.b")
    _tiered(pair, *paths)
    with pair.catalog() as catalog:
        changes = [_deletion(catalog.load_table(path), 10) for path in paths]
        stale = [_deletion(catalog.load_table(path), 20) for path in paths]

    assert pair.post(changes) == (204, {})
    assert _counts(pair, *paths) == [90, 90]
    status, answer = pair.post(stale)
    assert (status, answer["error"]["type"]) == (409, "CommitFailedException")

    for path in paths:
        pair.client.append(path, _rows(100, 150))
        assert tier_once(pair.client, path, token=TOKEN) == 50
        assert sorted(pair.client.read(path)["id"].to_pylist()) == list(range(10, 150))
    assert _counts(pair, *paths) == [140, 140]


def test_the_guards_of_the_front_hold_for_each_table(pair: Pair) -> None:
    paths = ("shop.c", "shop.d")
    _tiered(pair, *paths)
    with pair.catalog() as catalog:
        table = catalog.load_table(paths[1])
        again = table.transaction()
        again.append(table.scan(limit=1).to_arrow())
        changes = [_deletion(catalog.load_table(paths[0]), 10), change_of(table, again)]

    status, answer = pair.post(changes)

    assert (status, answer["error"]["type"]) == (403, "ForbiddenException")
    assert "more rows than it removes" in answer["error"]["message"]
    assert _counts(pair, *paths) == [100, 100]


def test_an_answer_that_is_lost_is_said_to_be_unknown(pair: Pair) -> None:
    """Cut at every piece of the answers: those about the tables, and the commit's own."""
    kinds: dict[str, int] = {}
    with pair.catalog() as catalog, pair.judge() as judge:
        judge.create_namespace_if_not_exists("own")
        for name in ("one", "two"):
            judge.create_table(f"own.{name}", SCHEMA)
        for cut in range(12):
            names = [f"own.{name}" for name in ("one", "two")]
            changes = [adding_column(catalog, name, f"c{cut}") for name in names]
            pair.proxy.pieces_to_pass, pair.proxy.answers_to_lose = cut, 1

            status, answer = pair.post(changes)

            pair.proxy.pieces_to_pass = pair.proxy.answers_to_lose = 0
            kind = answer["error"]["type"] if answer else "done"
            kinds[kind] = kinds.get(kind, 0) + 1
            has = [f"c{cut}" in judge.load_table(n).schema().column_names for n in names]
            assert has[0] == has[1]
            assert has[0] or status == 503
    assert set(kinds) == {"ServiceUnavailableException", "CommitStateUnknownException", "done"}


def test_secrets_of_the_catalog_behind_are_in_no_answer_and_no_log(tmp_path: Path) -> None:
    """A token with a line end: the HTTP client's own error repeats it."""
    arguments = (
        "--catalog-property=type=rest",
        "--catalog-property=uri=http://127.0.0.1:9/iceberg",
    )
    with ServiceProcess(
        tmp_path, *arguments, f"--catalog-property=token={TOKEN_BEHIND}\nx"
    ) as service:
        answer = urllib3.request("GET", f"{service.endpoint}/iceberg/v1/namespaces", timeout=60)

        assert (answer.status, TOKEN_BEHIND in answer.data.decode()) == (400, False)
        assert TOKEN_BEHIND not in service.log_text()
