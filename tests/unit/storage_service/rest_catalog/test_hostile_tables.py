"""Tables whose metadata says what no lake table may: written through the catalog, or behind it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError as RestForbidden
from pyiceberg.table import CommitTableResponse, Table

from streamhouse.core.errors import ForbiddenError, StreamhouseError
from streamhouse.lake.catalogs.guarded_catalog import guarded
from streamhouse.lake.opened_table import load_table
from streamhouse.lake.snapshots._manifests import entries_of, manifests_of
from tests.support.hostile_metadata import (
    HOSTILE_PROPERTIES,
    assert_create,
    entered,
    rewrite_metadata,
)
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import rows

ROWS = pa.table({"a": pa.array([1, 2, 3], pa.int64())})
SCHEMA_JSON = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "a", "required": False, "type": "long"}],
}


@pytest.fixture(autouse=True)
def nothing_entered() -> Iterator[None]:
    """No test of this file may run code that a table names."""
    entered.clear()
    yield
    assert entered == []


def _refused(rest: RestWorld, method: str, path: str, body: Any = None) -> str:
    """The message of a request that is refused as forbidden or malformed."""
    status, answer = rest.call(method, path, body)
    assert status in (400, 403), answer
    return str(answer["error"]["message"])


def _creation(location: str | None = None, **properties: str) -> dict[str, Any]:
    body: dict[str, Any] = {"name": "t", "schema": SCHEMA_JSON, "properties": properties}
    return body if location is None else {**body, "location": location}


# -- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HOSTILE_PROPERTIES))
def test_no_way_to_write_a_property_lets_a_hostile_one_in(
    rest: RestWorld, client: RestCatalog, name: str
) -> None:
    client.create_table("db.there", ROWS.schema)
    hostile = {name: HOSTILE_PROPERTIES[name]}
    free = f"file://{rest.world.folder}/warehouse/db/t"
    set_there = {
        "requirements": [],
        "updates": [{"action": "set-properties", "updates": hostile}],
    }
    there = {"identifier": {"namespace": ["db"], "name": "there"}, **set_there}

    for path, body in (
        ("namespaces/db/tables", _creation(**hostile)),
        ("namespaces/db/tables", {**_creation(**hostile), "stage-create": True}),
        ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, free, **hostile)),
        ("namespaces/db/tables/there", set_there),
        ("transactions/commit", {"table-changes": [there]}),
        ("namespaces/db/properties", {"updates": hostile}),
        ("namespaces", {"namespace": ["other"], "properties": hostile}),
    ):
        assert f"property '{name}' must not be set" in _refused(rest, "POST", path, body), path

    assert not client.table_exists("db.t")
    assert client.load_table("db.there").properties == {}
    assert client.list_namespaces() == [("db",)]


def test_a_metadata_file_with_a_hostile_property_is_not_registered(
    rest: RestWorld, client: RestCatalog
) -> None:
    table = client.create_table("db.t", ROWS.schema)
    path = Path(table.metadata_location.removeprefix("file://"))
    client.drop_table("db.t")
    value = json.loads(path.read_text())
    value["properties"] = HOSTILE_PROPERTIES
    path.write_text(json.dumps(value))

    body = {"name": "again", "metadata-location": table.metadata_location}

    assert "must not be set" in _refused(rest, "POST", "namespaces/db/register", body)


def test_what_came_in_behind_the_catalogs_back_is_dropped_everywhere(
    rest: RestWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The service's answers, a worker's round and a reader's plan; one warning, by name."""
    rest.world.create_table()
    rest.world.service.append("db.t", 0, rows(0, 10))
    rest.world.tier()
    spoil = lambda value: value["properties"].update(HOSTILE_PROPERTIES)  # noqa: E731
    rewrite_metadata(rest.world.folder / "catalog.db", "db.t", spoil)

    with caplog.at_level(logging.WARNING):
        _, answer = rest.call("GET", "namespaces/db/tables/t")
        rest.call("GET", "namespaces/db/tables/t")
        rest.world.service.append("db.t", 0, rows(10, 10))
        rest.world.tier()
        assert len(rest.world.addresses()) == 20
        # The round has left it out of what it wrote.
        rewrite_metadata(rest.world.folder / "catalog.db", "db.t", spoil)
        found = load_table(rest.world.catalog, "db.t")

    assert not HOSTILE_PROPERTIES.keys() & answer["metadata"]["properties"].keys()
    assert found is not None
    assert not HOSTILE_PROPERTIES.items() & found.io.properties.items()
    found.refresh()
    assert found.location_provider().data_path == f"{found.location()}/data"
    found.io.new_input(found.metadata_location).open().close()
    dropped = [r for r in caplog.messages if "event=lake_properties_dropped" in r]
    assert len(dropped) == 1
    assert "py-io-impl" in dropped[0]


class _SaysMore(SqlCatalog):
    """Its answer to a commit has what somebody else has written meanwhile."""

    def commit_table(self, *arguments: Any) -> CommitTableResponse:
        landed = super().commit_table(*arguments)
        properties = {**landed.metadata.properties, **HOSTILE_PROPERTIES}
        said = landed.metadata.model_copy(update={"properties": properties})
        return landed.model_copy(update={"metadata": said})


def test_what_the_answer_to_a_commit_says_is_dropped_too(tmp_path: Path) -> None:
    """pyiceberg takes it for the table, and looks there for the code to write files with."""
    properties = {"uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}/warehouse"}
    catalog = guarded(_SaysMore("lake", **properties), properties)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", ROWS.schema)

    for _ in range(2):
        table.append(ROWS)

    assert not HOSTILE_PROPERTIES.keys() & table.properties.keys()
    assert table.scan().to_arrow().num_rows == 6
    catalog.close()


# -- places --------------------------------------------------------------------------------------


def test_a_location_lies_below_the_warehouse_and_where_no_table_is(
    rest: RestWorld, client: RestCatalog
) -> None:
    client.create_table("db.there", ROWS.schema)
    warehouse = f"file://{rest.world.folder}/warehouse"
    (rest.world.folder / "warehouse" / "link").symlink_to("/etc")
    (rest.world.folder / "warehouse" / "alias").symlink_to(rest.world.folder / "warehouse" / "db")

    for location in (
        "file:///etc",
        "/etc",
        "s3://bucket/t",
        "http://127.0.0.1/t",
        warehouse,
        f"{warehouse}/../elsewhere",
        f"{warehouse}/%2e%2e/elsewhere",
        f"{warehouse}/db/t?x",
        f"{warehouse}/db/t#x",
        f"{warehouse}/link/t",
        f"{warehouse}/db",
        # The folder of a namespace to come.
        f"{warehouse}/other",
        f"{warehouse}/other/",
        f"{warehouse}/./other",
        f"{warehouse}/alias/../other",
        f"{warehouse}/db/there",
        f"{warehouse}/db/there/data",
        f"{warehouse}//db//there//x",
        f"{rest.world.folder}/warehouse/db/there/x",
        f"{warehouse}/alias/there/x",
        "__import__('os').system('id')",
    ):
        for path, body in (
            ("namespaces/db/tables", _creation(location)),
            ("namespaces/db/tables", {**_creation(location), "stage-create": True}),
            ("namespaces/db/tables/t", assert_create(SCHEMA_JSON, location)),
        ):
            assert "location" in _refused(rest, "POST", path, body), location
    move = {"requirements": [], "updates": [{"action": "set-location", "location": "file:///x"}]}
    assert "must stay" in _refused(rest, "POST", "namespaces/db/tables/there", move)
    lies = {"updates": {"location": "file:///etc"}}
    assert "warehouse" in _refused(rest, "POST", "namespaces/db/properties", lies)
    assert client.list_tables("db") == [("db", "there")]


def test_who_may_write_one_namespace_keeps_no_other_from_being_filled(
    rest: RestWorld, client: RestCatalog
) -> None:
    """The database has rows in its log and no lake table yet."""
    client.create_namespace("own")
    rest.world.create_table("later.t")
    rest.world.service.append("later.t", 0, rows(0, 5))
    for location in ("later", "later/t"):
        body = _creation(f"file://{rest.world.folder}/warehouse/{location}")
        rest.call("POST", "namespaces/own/tables", body)

    assert rest.world.tier("later.t").row_count == 5


def test_a_name_is_one_folder(rest: RestWorld, client: RestCatalog) -> None:
    client.create_table("db.there", ROWS.schema)
    for name in ("../x", "a/b", "..", "a%2fb", "a\nb", ""):
        _refused(rest, "POST", "namespaces/db/tables", {**_creation(), "name": name})
        _refused(rest, "POST", "namespaces", {"namespace": [name]})
        renaming = {
            "source": {"namespace": ["db"], "name": "there"},
            "destination": {"namespace": ["db"], "name": name},
        }
        _refused(rest, "POST", "tables/rename", renaming)
    assert not list(rest.world.folder.rglob("x"))


def test_a_name_that_was_renamed_away_is_free_for_another_table(client: RestCatalog) -> None:
    old = client.create_table("db.t", ROWS.schema)
    old.append(ROWS)
    client.rename_table("db.t", "db.old")

    new = client.create_table("db.t", ROWS.schema)
    new.append(ROWS)
    client.purge_table("db.t")

    assert new.location() != old.location()
    assert client.load_table("db.old").scan().to_arrow().num_rows == 3


def test_the_places_of_two_creations_at_once_do_not_overlap(
    rest: RestWorld, client: RestCatalog
) -> None:
    location = f"file://{rest.world.folder}/warehouse/db/shared"
    change = {
        "identifier": {"namespace": ["db"], "name": "one"},
        **assert_create(SCHEMA_JSON, location),
    }
    inside = {
        "identifier": {"namespace": ["db"], "name": "two"},
        **assert_create(SCHEMA_JSON, f"{location}/x"),
    }

    both = {"table-changes": [change, inside]}

    assert "another lake table" in _refused(rest, "POST", "transactions/commit", both)
    assert client.list_tables("db") == []


# -- files of others -----------------------------------------------------------------------------


def _victim(client: RestCatalog) -> Table:
    victim = client.create_table("db.victim", ROWS.schema)
    victim.append(ROWS)
    return victim


def _snapshot(table: Table, manifest_list: str, snapshot_id: int = 4711) -> dict[str, Any]:
    return {
        "requirements": [],
        "updates": [
            {
                "action": "add-snapshot",
                "snapshot": {
                    "snapshot-id": snapshot_id,
                    "sequence-number": table.metadata.last_sequence_number + 1,
                    "timestamp-ms": table.metadata.last_updated_ms + 1,
                    "manifest-list": manifest_list,
                    "summary": {"operation": "append"},
                    "schema-id": 0,
                },
            },
            {
                "action": "set-snapshot-ref",
                "ref-name": "main",
                "type": "branch",
                "snapshot-id": snapshot_id,
            },
        ],
    }


def _own_list_of(victim: Table, mine: Table) -> str:
    """The victim's manifest list, copied to where it is the other table's own."""
    found = victim.current_snapshot()
    assert found is not None
    path = f"{mine.location()}/metadata/copied.avro"
    source = Path(found.manifest_list.removeprefix("file://")).read_bytes()
    Path(path.removeprefix("file://")).write_bytes(source)
    return path


def test_a_commit_names_no_manifest_list_and_no_statistics_of_others(
    rest: RestWorld, client: RestCatalog
) -> None:
    victim, mine = _victim(client), client.create_table("db.mine", ROWS.schema)
    theirs = victim.current_snapshot()
    assert theirs is not None
    statistics = {
        "requirements": [],
        "updates": [
            {
                "action": "set-statistics",
                "snapshot-id": theirs.snapshot_id,
                "statistics": {
                    "snapshot-id": theirs.snapshot_id,
                    "statistics-path": theirs.manifest_list,
                    "file-size-in-bytes": 1,
                    "file-footer-size-in-bytes": 1,
                    "blob-metadata": [],
                },
            }
        ],
    }
    for body in (
        _snapshot(mine, theirs.manifest_list),
        _snapshot(mine, "file:///etc/passwd"),
        _snapshot(mine, f"{mine.location()}/../victim/metadata/x.avro"),
        statistics,
    ):
        message = _refused(rest, "POST", "namespaces/db/tables/mine", body)
        assert "does not lie below the table's location" in message


def test_a_commit_names_no_manifest_and_no_data_file_of_others(
    rest: RestWorld, client: RestCatalog
) -> None:
    victim, mine = _victim(client), client.create_table("db.mine", ROWS.schema)
    theirs = victim.current_snapshot()
    assert theirs is not None
    listed = _snapshot(mine, _own_list_of(victim, mine), theirs.snapshot_id)
    unlike = _snapshot(mine, _own_list_of(victim, mine))

    path = "namespaces/db/tables/mine"
    assert "does not lie below the table's location" in _refused(rest, "POST", path, listed)
    assert "cannot be read" in _refused(rest, "POST", path, unlike)

    # The library itself adds the victim's files to a manifest of mine.
    (task,) = victim.scan().plan_files()
    with pytest.raises(RestForbidden, match="does not lie below"):
        mine.add_files([task.file.file_path])
    assert client.load_table("db.mine").current_snapshot() is None
    assert client.load_table("db.victim").scan().to_arrow().num_rows == 3


def test_what_is_not_avro_is_refused_without_its_bytes(
    rest: RestWorld, client: RestCatalog
) -> None:
    mine = client.create_table("db.mine", ROWS.schema)
    path = Path(mine.location().removeprefix("file://")) / "metadata" / "snap-1.avro"
    path.write_text("the-secret-of-this-file " * 10)

    message = _refused(rest, "POST", "namespaces/db/tables/mine", _snapshot(mine, f"file://{path}"))

    assert "cannot be read" in message
    assert "the-secret" not in message


def test_a_purge_deletes_what_the_table_owns_and_nothing_else(
    rest: RestWorld, client: RestCatalog, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata from before there was a check, or put in behind the catalog's back."""
    victim, mine = _victim(client), client.create_table("db.mine", ROWS.schema)
    mine.append(ROWS)
    theirs = victim.current_snapshot()
    assert theirs is not None

    def spoil(value: dict[str, Any]) -> None:
        value["snapshots"].append(
            {
                **value["snapshots"][0],
                "snapshot-id": theirs.snapshot_id,
                "manifest-list": theirs.manifest_list,
            }
        )
        value["metadata-log"].append(
            {"metadata-file": victim.metadata_location, "timestamp-ms": value["last-updated-ms"]}
        )
        value["statistics"] = [
            {
                "snapshot-id": theirs.snapshot_id,
                "statistics-path": "/etc/hostname",
                "file-size-in-bytes": 1,
                "file-footer-size-in-bytes": 1,
                "blob-metadata": [],
            }
        ]

    rewrite_metadata(rest.world.folder / "catalog.db", "db.mine", spoil)
    client.purge_table("db.mine")

    assert client.load_table("db.victim").scan().to_arrow().num_rows == 3
    assert Path("/etc/hostname").exists()
    left = [p for p in (rest.world.folder / "warehouse/db/mine").rglob("*") if p.is_file()]
    # The former metadata file is in no log any more.
    assert [p.suffix for p in left] == [".json"] * len(left)
    assert any("event=foreign_lake_files_stay" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda v: v.update(location="file:///elsewhere/mine"), "does not lie below the warehouse"),
        (lambda v: v["properties"].update({"gc.enabled": "false"}), "gc.enabled"),
    ],
)
def test_a_purge_of_files_that_may_be_others_is_refused(
    rest: RestWorld, client: RestCatalog, spoil: Callable[[dict[str, Any]], Any], why: str
) -> None:
    client.create_table("db.mine", ROWS.schema).append(ROWS)
    rewrite_metadata(rest.world.folder / "catalog.db", "db.mine", spoil)

    assert why in _refused(rest, "DELETE", "namespaces/db/tables/mine?purgeRequested=true")

    assert rest.call("DELETE", "namespaces/db/tables/mine")[0] == 204
    assert list((rest.world.folder / "warehouse/db/mine").rglob("*.parquet"))


def test_old_metadata_files_of_others_survive_a_commit(
    rest: RestWorld, client: RestCatalog
) -> None:
    victim = _victim(client)
    properties = {
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "1",
    }
    client.create_table("db.mine", ROWS.schema, properties=properties).append(ROWS)

    def spoil(value: dict[str, Any]) -> None:
        entry = {"metadata-file": victim.metadata_location, "timestamp-ms": 1}
        value["metadata-log"].insert(0, entry)

    rewrite_metadata(rest.world.folder / "catalog.db", "db.mine", spoil)
    for _ in range(3):
        client.load_table("db.mine").append(ROWS)

    assert client.load_table("db.victim").scan().to_arrow().num_rows == 3


def test_a_reader_opens_no_file_that_is_not_the_tables(
    rest: RestWorld, client: RestCatalog
) -> None:
    victim = _victim(client)
    client.create_table("db.mine", ROWS.schema).append(ROWS)
    theirs = victim.current_snapshot()
    assert theirs is not None

    def spoil(value: dict[str, Any]) -> None:
        value["snapshots"][0]["manifest-list"] = theirs.manifest_list

    rewrite_metadata(rest.world.folder / "catalog.db", "db.mine", spoil)
    found = load_table(rest.world.catalog, "db.mine")
    assert found is not None
    snapshot = found.current_snapshot()
    assert snapshot is not None

    with pytest.raises(ForbiddenError, match="does not lie below the table's location"):
        manifests_of(found.io, snapshot)
    own = load_table(rest.world.catalog, "db.victim")
    assert own is not None
    (manifest,) = manifests_of(own.io, theirs)
    with pytest.raises(ForbiddenError, match="does not lie below the table's location"):
        entries_of(found.io, manifest)


# -- register ------------------------------------------------------------------------------------


def test_a_registration_tells_nothing_of_files(rest: RestWorld, client: RestCatalog) -> None:
    secret = rest.world.folder / "token"
    secret.write_text("the-owners-token")
    below = rest.world.folder / "warehouse" / "db" / "x" / "metadata"
    below.mkdir(parents=True)
    (below / "1.metadata.json").write_text('{"format-version": "the-owners-token"}')
    (below / "2.metadata.json").write_text("the-owners-token")

    def said(location: str) -> str:
        body = {"name": "t", "metadata-location": location}
        message = _refused(rest, "POST", "namespaces/db/register", body)
        assert "the-owners" not in message
        return message.replace(location, "X")

    def alike(*locations: str) -> None:
        assert len({said(location) for location in locations}) == 1

    alike(f"file://{secret}", "file:///etc/passwd", "file:///no/such/file", "s3://b/x")
    alike("file:///etc/metadata/a.metadata.json", "http://127.0.0.1:1/metadata/a.metadata.json")
    alike(*(f"file://{below}/{number}.metadata.json" for number in (1, 2, 3)))


def test_a_table_is_registered_only_from_a_place_of_its_own(
    rest: RestWorld, client: RestCatalog
) -> None:
    victim = _victim(client)
    copied = rest.world.folder / "warehouse" / "db" / "copied" / "metadata" / "0.metadata.json"
    copied.parent.mkdir(parents=True)
    copied.write_bytes(Path(victim.metadata_location.removeprefix("file://")).read_bytes())

    for location in (victim.metadata_location, f"file://{copied}"):
        body = {"name": "t", "metadata-location": location}
        _refused(rest, "POST", "namespaces/db/register", body)

    client.drop_table("db.victim")
    found = client.register_table("db.t", victim.metadata_location)
    assert found.scan().to_arrow().num_rows == 3


def test_a_metadata_file_that_rots_is_not_quoted(rest: RestWorld, client: RestCatalog) -> None:
    table = client.create_table("db.t", ROWS.schema)
    rewrite_metadata(
        rest.world.folder / "catalog.db",
        "db.t",
        lambda v: v.update({"last-column-id": "the-secret"}),
    )

    status, answer = rest.call("GET", "namespaces/db/tables/t")

    assert status >= 400
    assert "the-secret" not in answer["error"]["message"]
    assert table.name() == ("db", "t")
    with pytest.raises(StreamhouseError) as caught:
        load_table(rest.world.catalog, "db.t")
    assert "the-secret" not in caught.value.message


def test_a_name_with_a_slash_is_not_another_tables(rest: RestWorld, client: RestCatalog) -> None:
    """Grants are looked up by the parts of the path as it is written."""
    client.create_table("db.t", ROWS.schema)

    for path in ("namespaces/db%2Ftables%2Ft", "namespaces/db/tables/t%2Fx"):
        assert "must not have '/'" in _refused(rest, "GET", path)
