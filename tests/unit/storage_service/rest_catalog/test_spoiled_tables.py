"""Tables that were spoiled behind the catalog's back, where a worker or an adoption meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table

from streamhouse.core.errors import ForbiddenError
from streamhouse.core.model.lake.facts import LAKE_PATHS_PROPERTY, LakeCatalog
from streamhouse.core.model.table import TablePath
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.commits.orphans import find_orphans
from streamhouse.lake.files._bounded_io import only_own
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.guards.adoptable_lake import find_adoptable
from streamhouse.lake.opened_table import load_table
from streamhouse.lake.snapshots._manifests import manifests_of
from streamhouse.lake.snapshots.live_files import data_files
from tests.support.hostile_metadata import rewrite_metadata
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import rows

ROWS = pa.table({"a": pa.array([1, 2, 3], pa.int64())})


def _victim(client: RestCatalog) -> Table:
    victim = client.create_table("db.victim", ROWS.schema)
    victim.append(ROWS)
    return victim


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda v: v.update(location="file:///elsewhere/t"), "does not lie below the warehouse"),
        (
            lambda v: v["metadata-log"].append(
                {"metadata-file": "/etc/x", "timestamp-ms": v["last-updated-ms"]}
            ),
            "does not lie below the table's location",
        ),
    ],
)
def test_a_lake_table_that_names_files_of_others_is_not_adopted(
    rest: RestWorld, spoil: Callable[[dict[str, Any]], Any], why: str
) -> None:
    rest.world.create_table()
    rest.world.service.append("db.t", 0, rows(0, 10))
    rest.world.tier()
    rest.world.service.drop_table("db.t")
    rewrite_metadata(rest.world.folder / "catalog.db", "db.t", spoil)
    catalog = open_catalog(rest.world.catalog)

    with pytest.raises(ForbiddenError, match=why):
        find_adoptable(catalog, TablePath.parse("db.t"), rest.tables, is_forced=True, now_ms=2**41)
    catalog.close()
    # What tests leave is read by every engine (`integration/test_every_lake.py`).
    judge = load_catalog(rest.world.catalog.name, **rest.world.catalog.properties)
    judge.drop_table("db.t")
    judge.close()


def test_the_operator_can_name_more_places_for_files(rest: RestWorld, client: RestCatalog) -> None:
    """A table that another engine made of files it found elsewhere."""
    victim = _victim(client)
    (task,) = victim.scan().plan_files()
    judge = load_catalog(rest.world.catalog.name, **rest.world.catalog.properties)
    judge.create_table("db.mine", ROWS.schema).add_files([task.file.file_path])
    judge.close()

    def files(**more: str) -> list[str]:
        described = LakeCatalog(name="lake", properties={**rest.world.catalog.properties, **more})
        found = load_table(described, "db.mine")
        assert found is not None
        snapshot = found.current_snapshot()
        assert snapshot is not None
        (manifest,) = manifests_of(found.io, snapshot)
        return list(data_files(found.io, manifest).paths)

    with pytest.raises(ForbiddenError, match=LAKE_PATHS_PROPERTY):
        files()
    assert files(**{LAKE_PATHS_PROPERTY: victim.location()}) == [task.file.file_path]


def test_maintenance_looks_for_no_orphans_where_another_table_is(rest: RestWorld) -> None:
    for path in ("db.t", "db.u"):
        rest.world.create_table(path)
        rest.world.service.append(path, 0, rows(0, 10))
        rest.world.tier(path)
    theirs = rest.world.lake_table("db.u").location()
    rewrite_metadata(rest.world.folder / "catalog.db", "db.t", lambda v: v.update(location=theirs))
    catalog = open_catalog(rest.world.catalog)
    table = catalog.load_table("db.t")

    with pytest.raises(ForbiddenError, match="another lake table"):
        find_orphans(table, LakeFilesystem({}), modified_before_ms=2**60)

    rewrite_metadata(
        rest.world.folder / "catalog.db", "db.t", lambda v: v.update(location="file:///")
    )
    table.refresh()
    with pytest.raises(ForbiddenError, match="does not lie below the warehouse"):
        find_orphans(table, LakeFilesystem({}), modified_before_ms=2**60)
    catalog.close()


def test_an_expiry_deletes_no_file_of_others(
    rest: RestWorld, client: RestCatalog, caplog: pytest.LogCaptureFixture
) -> None:
    victim, mine = _victim(client), client.create_table("db.mine", ROWS.schema)
    mine.append(ROWS)
    (task,) = victim.scan().plan_files()
    (own,) = mine.scan().plan_files()
    table = load_table(rest.world.catalog, "db.mine")
    assert table is not None

    paths = [task.file.file_path, own.file.file_path, "/etc/hostname", f"{mine.location()}/../x"]

    assert only_own(table.io, paths) == [own.file.file_path]
    with pytest.raises(ForbiddenError, match="does not lie below"):
        table.io.delete(task.file.file_path)
    assert any("event=foreign_lake_files_stay" in message for message in caplog.messages)
