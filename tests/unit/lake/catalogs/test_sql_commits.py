"""Commits to a SQL catalog that are cut off: what is current has its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.update import AssertTableUUID, SetPropertiesUpdate
from sqlalchemy import event

from streamhouse.core.errors import UnknownOutcomeError
from streamhouse.lake.catalogs._sql_commits import StagedCommit, commit_staged
from tests.support.iceberg_world import IcebergWorld, numbered


def _staged(catalog: SqlCatalog, name: str) -> StagedCommit:
    table = catalog.load_table(name)
    staged = catalog._update_and_stage_table(
        table,
        Catalog.identifier_to_tuple(name),
        (AssertTableUUID(uuid=table.metadata.table_uuid),),
        (SetPropertiesUpdate(updates={"number": "1"}),),
    )
    return StagedCommit(base=table, staged=staged)


@pytest.mark.parametrize(
    ("moment", "error", "raised"),
    [
        ("commit", KeyboardInterrupt(), KeyboardInterrupt),
        ("commit", ConnectionError("gone"), UnknownOutcomeError),
        ("checkin", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_commit_that_was_cut_off_leaves_its_file(
    tmp_path: Path, moment: str, error: BaseException, raised: type[BaseException]
) -> None:
    with IcebergWorld(tmp_path) as world:
        world.create(numbered(0, 1).schema)
        catalog = world.catalog
        commit = _staged(catalog, world.NAME)

        def cut_off(*_: Any) -> None:
            event.remove(catalog.engine, moment, cut_off)
            raise error

        event.listen(catalog.engine, moment, cut_off)
        with pytest.raises(raised):
            commit_staged(catalog, [commit])

        location = str(commit.staged.metadata_location).removeprefix("file://")
        assert Path(location).exists()
        # It has landed: such an end of the transaction lets the database commit.
        assert world.table().properties["number"] == "1"
