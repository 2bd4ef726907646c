"""A REST catalog over another one: commits of several tables, and what its answers become.

The one behind is the same code over a SQL catalog; here it is asked without a socket, and some of
its answers are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.update import AssertRefSnapshotId, RemoveSnapshotRefUpdate

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.lake.guards.table_commits import TableCommits
from tests.support.fake_service import FakeService
from tests.support.rest_world import (
    FakeServedTables,
    FrontWorld,
    RestWorld,
    adding_column,
    change_of,
)
from tests.support.tiering_world import TieringWorld, rows

ROWS = pa.table({"a": pa.array([1, 2, 3], pa.int64()), "b": ["x", None, "z"]})
TOKEN = "token-for-the-catalog-behind"


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontWorld]:
    """A service whose catalog is that of the world behind it, which has tables db.one, db.two."""
    (tmp_path / "behind").mkdir()
    with (
        TieringWorld(tmp_path / "behind") as world,
        RestWorld(world) as behind,
        FrontWorld(behind, token=TOKEN) as opened,
    ):
        client = behind.client()
        client.create_namespace("db")
        for name in ("one", "two"):
            client.create_table(f"db.{name}", ROWS.schema)
        yield opened


def _both(front: FrontWorld, column: str) -> dict[str, Any]:
    client = front.rest.client()
    return {"table-changes": [adding_column(client, f"db.{n}", column) for n in ("one", "two")]}


def _columns(front: FrontWorld) -> list[list[str]]:
    client = front.behind.client()
    return [client.load_table(f"db.{name}").schema().column_names for name in ("one", "two")]


def test_several_tables_change_together_through_the_catalog_behind(front: FrontWorld) -> None:
    both, stale = _both(front, "c"), _both(front, "d")

    assert front.rest.call("POST", "transactions/commit", both) == (204, {})
    assert _columns(front) == [["a", "b", "c"], ["a", "b", "c"]]
    status, answer = front.rest.call("POST", "transactions/commit", stale)

    assert (status, answer["error"]["type"]) == (409, "CommitFailedException")
    assert _columns(front) == [["a", "b", "c"], ["a", "b", "c"]]
    assert front.requests.count("POST transactions/commit") == 1


def test_rows_of_two_tables_and_a_new_table_come_together(front: FrontWorld) -> None:
    client = front.rest.client()
    changes = []
    for name in ("one", "two"):
        table = client.load_table(f"db.{name}")
        transaction = table.transaction()
        transaction.append(ROWS)
        changes.append(change_of(table, transaction))
    creation = client.create_table_transaction("db.three", ROWS.schema)
    creation.append(ROWS)
    changes.append(
        {**change_of(creation._table, creation), "requirements": [{"type": "assert-create"}]}
    )

    assert front.rest.call("POST", "transactions/commit", {"table-changes": changes}) == (204, {})

    for name in ("one", "two", "three"):
        assert front.behind.client().load_table(f"db.{name}").scan().to_arrow().num_rows == 3


def test_a_commit_between_the_check_and_the_forwarding_lets_none_land(front: FrontWorld) -> None:
    """The catalog behind is open to others: what was checked is what the commit asserts."""
    client = front.rest.client()
    changes = [adding_column(client, f"db.{name}", "c") for name in ("one", "two")]
    for change in changes:
        # The client itself asserts nothing.
        change["requirements"] = []
    front.before["transactions/commit"] = lambda: (
        front.behind.client().load_table("db.two").append(ROWS)
    )

    status, answer = front.rest.call("POST", "transactions/commit", {"table-changes": changes})

    assert (status, answer["error"]["type"]) == (409, "CommitFailedException")
    assert _columns(front) == [["a", "b"], ["a", "b"]]


def test_every_table_is_guarded_before_anything_is_forwarded(front: FrontWorld) -> None:
    front.rest.world.create_table("db.t")
    front.rest.world.service.append("db.t", 0, rows(0, 50))
    front.rest.world.tier("db.t")
    client = front.rest.client()
    harmless = adding_column(client, "db.one", "c")
    table = client.load_table("db.t")
    rolled_back = {
        "identifier": {"namespace": ["db"], "name": "t"},
        "requirements": [
            AssertRefSnapshotId.model_validate(
                {"ref": "main", "snapshot-id": table.metadata.current_snapshot_id}
            )
        ],
        "updates": [RemoveSnapshotRefUpdate.model_validate({"ref-name": "main"})],
    }
    rolled_back = json.loads(
        json.dumps(rolled_back, default=lambda m: m.model_dump(mode="json", by_alias=True))
    )
    front.requests.clear()

    for changes in ([harmless, rolled_back], [rolled_back, harmless]):
        status, answer = front.rest.call("POST", "transactions/commit", {"table-changes": changes})

        assert (status, answer["error"]["type"]) == (403, "ForbiddenException")
        assert "would lose rows" in answer["error"]["message"]
    assert "POST transactions/commit" not in front.requests
    assert _columns(front)[0] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "status", "kind"),
    [
        ((400, "BadRequestException"), 400, "BadRequestException"),
        ((401, "NotAuthorizedException"), 503, "ServiceUnavailableException"),
        ((403, "ForbiddenException"), 403, "ForbiddenException"),
        ((404, "NoSuchTableException"), 404, "NoSuchTableException"),
        ((405, None), 501, "UnsupportedOperationException"),
        ((409, "CommitFailedException"), 409, "CommitFailedException"),
        ((422, "UnprocessableEntity"), 400, "BadRequestException"),
        ((429, None), 503, "ServiceUnavailableException"),
        ((500, "InternalServerError"), 500, "CommitStateUnknownException"),
        ((501, "UnsupportedOperationException"), 501, "UnsupportedOperationException"),
        ((502, None), 500, "CommitStateUnknownException"),
        # The catalog itself says that it is not ready; a proxy says so of what it passed on, too.
        ((503, "ServiceUnavailableException"), 503, "ServiceUnavailableException"),
        ((503, None), 500, "CommitStateUnknownException"),
        ((504, None), 500, "CommitStateUnknownException"),
        ((408, None), 500, "CommitStateUnknownException"),
        ((None, None), 500, "CommitStateUnknownException"),
    ],
)
@pytest.mark.parametrize("is_one", [False, True])
def test_what_the_catalog_behind_answers_is_passed_on(
    front: FrontWorld,
    said: tuple[int | None, str | None],
    status: int,
    kind: str,
    is_one: bool,
) -> None:
    both = _both(front, "c")
    path, body = "transactions/commit", both
    if is_one:
        path, body = "namespaces/db/tables/one", both["table-changes"][0]
    # It echoes what it was sent, as some do.
    text = f"as if with Bearer {TOKEN}"
    code, name = said
    front.instead[path] = (
        (code, {"error": {"message": text, "type": name, "code": code}})
        if name
        else (code, f"<html>{text}</html>")
    )

    found, answer = front.rest.call("POST", path, body)

    assert (found, answer["error"]["type"]) == (status, kind)
    assert answer["error"]["message"].startswith("cannot commit to lake table 'db.one'")
    assert TOKEN not in json.dumps(answer)
    # Refused credentials are made anew once; nothing else is ever sent again.
    assert front.requests.count(f"POST {path}") == (2 if code == 401 else 1)


def test_an_answer_that_is_lost_leaves_the_outcome_unknown(front: FrontWorld) -> None:
    both = _both(front, "c")
    front.is_answer_lost = True

    status, answer = front.rest.call("POST", "transactions/commit", both)

    assert (status, answer["error"]["type"]) == (500, "CommitStateUnknownException")
    # It had landed, which is what the client finds when it looks.
    assert _columns(front) == [["a", "b", "c"], ["a", "b", "c"]]


@pytest.mark.parametrize("text", ["<html>all is well</html>", '{"metadata": {}}', "{", ""])
def test_an_answer_that_cannot_be_read_leaves_the_outcome_unknown(
    front: FrontWorld, text: str
) -> None:
    change = _both(front, "c")["table-changes"][0]
    path = "namespaces/db/tables/one"
    front.before[path] = lambda: front.behind.call("POST", path, change)
    front.instead[path] = (200, text)

    status, answer = front.rest.call("POST", path, change)

    assert (status, answer["error"]["type"]) == (500, "CommitStateUnknownException")
    assert _columns(front)[0] == ["a", "b", "c"]


def test_a_refusal_of_a_commit_that_has_landed_is_looked_through(front: FrontWorld) -> None:
    """Something between sent it twice, and passed on the answer to the second."""
    table = front.rest.client().load_table("db.one")
    transaction = table.transaction()
    transaction.append(ROWS)
    change = change_of(table, transaction)
    path = "namespaces/db/tables/one"

    front.before[path] = lambda: front.behind.call("POST", path, change)
    assert front.rest.call("POST", path, change)[0] == 200
    assert front.rest.call("POST", path, change)[0] == 409

    assert front.behind.client().load_table("db.one").scan().to_arrow().num_rows == 3


@pytest.mark.parametrize("says", ["nothing", "all", "all but commits of several"])
def test_a_catalog_behind_is_asked_for_what_it_offers(front: FrontWorld, says: str) -> None:
    both = _both(front, "c")
    if says != "all":
        config = front.behind.call("GET", "config")[1]
        endpoints = [e for e in config.pop("endpoints") if "transactions" not in e]
        more = {} if says == "nothing" else {"endpoints": endpoints}
        front.instead["config"] = (200, {**config, **more})
    front.rest.reopen()

    status, answer = front.rest.call("POST", "transactions/commit", both)
    alone = front.rest.call(
        "POST", "transactions/commit", {"table-changes": both["table-changes"][:1]}
    )

    if says == "all but commits of several":
        assert (status, answer["error"]["type"]) == (501, "UnsupportedOperationException")
        assert answer["error"]["message"] == (
            "catalog 'front' commits one table at a time: the REST server behind it does not offer"
            " transactions/commit"
        )
        assert (alone[0], _columns(front)) == (204, [["a", "b", "c"], ["a", "b"]])
    else:
        assert (status, _columns(front)) == (204, [["a", "b", "c"], ["a", "b", "c"]])


def _commits(catalog: Catalog) -> TableCommits:
    described = LakeCatalog(name=catalog.name, properties={SERVICE_ID_PROPERTY: "0123"})
    return TableCommits(catalog, FakeServedTables(FakeService(described), "0123"))


def test_a_catalog_that_changes_one_table_at_a_time_says_so() -> None:
    # As Hive's, Glue's and DynamoDB's, whose libraries are not installed here.
    catalog = NoopCatalog("hms")
    changes = [
        (("db", named["name"]), CommitTableRequest.model_validate({"identifier": named}))
        for named in ({"namespace": ["db"], "name": name} for name in ("one", "two"))
    ]

    with pytest.raises(
        UnsupportedError,
        match="catalog 'hms' commits one table at a time: NoopCatalog cannot change several tables",
    ):
        _commits(catalog).commit_all(changes)


def test_the_catalog_in_memory_is_a_sql_catalog(tmp_path: Path) -> None:
    catalog = load_catalog("memory", type="in-memory", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("db")
    for name in ("one", "two"):
        catalog.create_table(f"db.{name}", ROWS.schema)
    changes = [
        (("db", n), CommitTableRequest.model_validate(adding_column(catalog, f"db.{n}", "c")))
        for n in ("one", "two")
    ]

    _commits(catalog).commit_all(changes)

    found = [catalog.load_table(f"db.{name}").schema().column_names for name in ("one", "two")]
    assert found == [["a", "b", "c"], ["a", "b", "c"]]
    catalog.close()
