"""The REST protocol over a SQL catalog: namespaces, tables, pages, and errors in its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)

from tests.support.rest_world import RestWorld, adding_column
from tests.support.tiering_world import rows

ROWS = pa.table({"a": pa.array([1, 2, 3], pa.int64()), "b": ["x", None, "z"]})


def test_a_namespace_lives_from_creation_to_dropping(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("sales", {"owner": "me"})

    with pytest.raises(NamespaceAlreadyExistsError):
        client.create_namespace("sales")
    summary = client.update_namespace_properties("sales", {"owner", "ghost"}, {"team": "x"})
    assert (summary.removed, summary.updated, summary.missing) == (["owner"], ["team"], ["ghost"])
    assert client.load_namespace_properties("sales")["team"] == "x"
    assert client.namespace_exists("sales")
    assert not client.namespace_exists("other")
    client.create_namespace(("sales", "eu"))
    assert client.list_namespaces() == [("sales",)]
    assert client.list_namespaces("sales") == [("sales", "eu")]
    client.drop_namespace(("sales", "eu"))
    client.drop_namespace("sales")
    assert client.list_namespaces() == []
    for call in (client.drop_namespace, client.load_namespace_properties, client.list_tables):
        with pytest.raises(NoSuchNamespaceError):
            call("sales")


def test_a_table_lives_from_creation_to_purging(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    table = client.create_table("db.mine", ROWS.schema)

    table.append(ROWS)
    table.append(ROWS)

    with pytest.raises(TableAlreadyExistsError):
        client.create_table("db.mine", ROWS.schema)
    with pytest.raises(NamespaceNotEmptyError):
        client.drop_namespace("db")
    assert client.load_table("db.mine").scan().to_arrow().num_rows == 6
    client.rename_table("db.mine", "db.yours")
    assert client.list_tables("db") == [("db", "yours")]
    assert not client.table_exists("db.mine")
    assert client.table_exists("db.yours")
    renamed = client.load_table("db.yours")
    assert renamed.metadata_location == table.metadata_location
    client.drop_table("db.yours")
    registered = client.register_table("db.again", renamed.metadata_location)
    assert registered.scan().to_arrow().num_rows == 6
    client.purge_table("db.again")
    assert not list(rest.world.folder.rglob("*.parquet"))
    with pytest.raises(NoSuchTableError):
        client.load_table("db.again")


def test_a_name_that_is_taken_is_not_registered(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    there, other = (client.create_table(f"db.{n}", pa.schema([("a", pa.int64())])) for n in "uv")
    for table in (there, other):
        body = {"name": "u", "metadata-location": table.metadata_location}

        status, answer = rest.call("POST", "namespaces/db/register", body)

        assert (status, answer["error"]["type"]) == (409, "AlreadyExistsException")


def test_a_sorted_table_may_become_unsorted(rest: RestWorld) -> None:
    """As Iceberg Java says it: the last order added, which is no order, becomes the default."""
    rest.world.create_table()
    rest.world.service.append("db.t", 0, rows(0, 10))
    rest.world.tier()
    unsorted = {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}}
    last = {"action": "set-default-sort-order", "sort-order-id": -1}

    status, _ = rest.call(
        "POST", "namespaces/db/tables/t", {"requirements": [], "updates": [unsorted, last]}
    )

    assert status == 200
    assert rest.client().load_table("db.t").metadata.default_sort_order_id == 0
    rest.world.service.append("db.t", 0, rows(10, 10))
    assert rest.world.tier().row_count == 10


def test_a_staged_table_has_folders_to_write_to(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    made = client.create_table_transaction("db.u", pa.schema([("a", pa.int64())]))

    folder = Path(made._table.location().removeprefix("file://"))

    assert sorted(path.name for path in folder.iterdir()) == ["data", "metadata"]


def test_a_table_is_created_with_its_first_rows_in_one_commit(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")

    with client.create_table_transaction("db.t", ROWS.schema) as transaction:
        assert not client.table_exists("db.t")
        transaction.append(ROWS)

    assert client.load_table("db.t").scan().to_arrow().num_rows == 3


def test_of_two_commits_to_one_state_the_second_is_refused(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    client.create_table("db.t", ROWS.schema, properties={"commit.retry.num-retries": "0"})
    first, second = client.load_table("db.t"), client.load_table("db.t")
    first.append(ROWS)

    with pytest.raises(CommitFailedException):
        second.append(ROWS)

    metadata = rest.world.folder / "warehouse" / "db" / "t" / "metadata"
    known = {entry.metadata_file for entry in client.load_table("db.t").metadata.metadata_log}
    known.add(client.load_table("db.t").metadata_location)
    # A commit that lost leaves no metadata file behind.
    assert {f"file://{path}" for path in metadata.glob("*.json")} == known


def test_several_tables_change_together_or_not_at_all(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    for name in ("one", "two"):
        client.create_table(f"db.{name}", ROWS.schema)
    both = {"table-changes": [adding_column(client, f"db.{name}", "c") for name in ("one", "two")]}
    stale = {"table-changes": [adding_column(client, f"db.{name}", "d") for name in ("one", "two")]}

    assert rest.call("POST", "transactions/commit", both) == (204, {})
    with client.load_table("db.two").update_schema() as update:
        update.add_column("e", client.load_table("db.two").schema().find_type("a"))
    status, answer = rest.call("POST", "transactions/commit", stale)

    assert (status, answer["error"]["type"]) == (409, "CommitFailedException")
    assert client.load_table("db.one").schema().column_names == ["a", "b", "c"]
    assert client.load_table("db.two").schema().column_names == ["a", "b", "c", "e"]


def test_rows_of_the_catalog_are_taken_in_one_order(rest: RestWorld) -> None:
    """Whatever order a commit names them in: two commits must not wait for each other."""
    client = rest.client()
    client.create_namespace("db")
    for name in ("one", "two"):
        client.create_table(f"db.{name}", ROWS.schema)
    changes = [adding_column(client, f"db.{name}", "c") for name in ("two", "one")]
    catalog = rest.api._open.get()
    assert isinstance(catalog, SqlCatalog)
    taken: list[str] = []
    sqlalchemy.event.listen(
        catalog.engine,
        "before_cursor_execute",
        lambda _c, _k, statement, values, *_: (
            taken.extend(v for v in values if v in ("one", "two"))
            if statement.startswith("UPDATE")
            else None
        ),
    )

    assert rest.call("POST", "transactions/commit", {"table-changes": changes})[0] == 204

    assert taken == ["one", "two"]


def test_lists_come_in_pages_to_those_who_ask_for_pages(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    names = [f"t{i}" for i in range(5)]
    for name in names:
        client.create_table(f"db.{name}", ROWS.schema)

    found, token, pages = [], "", 0
    while token is not None:
        status, page = rest.call("GET", f"namespaces/db/tables?pageSize=2&pageToken={token}")
        assert status == 200
        found += [entry["name"] for entry in page["identifiers"]]
        token, pages = page["next-page-token"], pages + 1

    assert (found, pages) == (names, 3)
    assert len(rest.call("GET", "namespaces/db/tables")[1]["identifiers"]) == 5
    assert rest.call("GET", "namespaces/db/tables?pageToken=%21")[0] == 400
    assert rest.call("GET", "namespaces/db/tables?pageToken=&pageSize=x")[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "namespaces/none/tables/t", None, 404, "NoSuchTableException"),
        ("HEAD", "namespaces/none/tables/t", None, 404, "NoSuchTableException"),
        ("GET", "namespaces/none", None, 404, "NoSuchNamespaceException"),
        ("GET", "namespaces/db/views/v", None, 404, "NotFoundException"),
        ("POST", "namespaces/db/views", {}, 501, "UnsupportedOperationException"),
        ("POST", "oauth/tokens", {}, 501, "UnsupportedOperationException"),
        ("GET", "nothing", None, 501, "UnsupportedOperationException"),
        ("PUT", "namespaces", {}, 501, "UnsupportedOperationException"),
        ("POST", "namespaces", {"namespace": "db"}, 400, "BadRequestException"),
        ("POST", "namespaces", {"namespace": [""]}, 400, "BadRequestException"),
        ("POST", "namespaces/db/tables", {"name": "t"}, 400, "BadRequestException"),
        ("POST", "tables/rename", {"source": {}}, 400, "BadRequestException"),
        ("POST", "transactions/commit", {"table-changes": []}, 400, "BadRequestException"),
        ("POST", "transactions/commit", [], 400, "BadRequestException"),
        (
            "POST",
            "namespaces/db/tables/t",
            {"updates": [{"action": "guess"}]},
            400,
            "BadRequestException",
        ),
    ],
)
def test_what_is_wrong_is_said_in_the_protocols_form(
    rest: RestWorld, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    found, answer = rest.call(method, path, body)

    assert (found, answer["error"]["code"], answer["error"]["type"]) == (status, status, kind)
    assert answer["error"]["message"]


def test_there_are_no_views(rest: RestWorld) -> None:
    assert rest.call("GET", "namespaces/db/views") == (200, {"identifiers": []})


def test_a_client_may_ask_for_referenced_snapshots_only(rest: RestWorld) -> None:
    client = rest.client()
    client.create_namespace("db")
    table = client.create_table("db.t", ROWS.schema)
    for _ in range(3):
        table.append(ROWS)

    _, everything = rest.call("GET", "namespaces/db/tables/t")
    _, referenced = rest.call("GET", "namespaces/db/tables/t?snapshots=refs")

    assert len(everything["metadata"]["snapshots"]) == 3
    current = everything["metadata"]["current-snapshot-id"]
    assert [s["snapshot-id"] for s in referenced["metadata"]["snapshots"]] == [current]


def test_metrics_are_taken(rest: RestWorld) -> None:
    assert rest.call("POST", "namespaces/db/tables/t/metrics", {"report-type": "scan"}) == (
        204,
        {},
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"location": {"a": 1}},
        {"location": 7},
        {"properties": ["a"]},
        {"properties": {"a": {"b": "c"}}},
        {"schema": ["a"]},
        {"partition-spec": "day"},
        {"write-order": [1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_staged", [False, True])
def test_a_field_of_another_type_is_the_callers_mistake(
    rest: RestWorld, wrong: dict[str, Any], is_staged: bool
) -> None:
    rest.client().create_namespace("db")
    fields = [{"id": 1, "name": "id", "type": "long", "required": True}]
    schema = {"type": "struct", "schema-id": 0, "fields": fields}
    body = {"name": "t", "schema": schema, "stage-create": is_staged} | wrong

    status, answer = rest.call("POST", "namespaces/db/tables", body)

    assert status == 400, answer
    assert rest.call("GET", "namespaces/db/tables")[1]["identifiers"] == []


@pytest.mark.parametrize("name", ["lives", "livee"])
def test_a_mistyped_live_warehouse_is_no_committed_one(rest: RestWorld, name: str) -> None:
    status, answer = rest.call("GET", f"config?warehouse={name}")

    assert status == 400
    assert f"no warehouse '{name}'; did you mean 'live'?" in answer["error"]["message"]
    assert rest.call("GET", "config?warehouse=lake")[0] == 200
