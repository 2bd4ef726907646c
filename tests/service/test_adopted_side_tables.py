"""The lake tables beside the rows' own, when a table goes on from its lake alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.errors import UnsupportedError
from tests.support.adoption_world import KEYED, SCHEMA, Lake, adopt, by_id, filled, go_on, rows
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


def test_history_and_batch_layout_come_along(lake: Lake) -> None:
    layout = {"table.datalake.changelog": "true", "table.datalake.batch-layout.sort": "name"}
    with lake.service("a") as (_, client):
        log, keyed = filled(client, **layout)
        changes = _changes(client)
    lake.lose("a")

    with lake.service("b") as (_, client):
        adopt(client)
        state = client.table_state(KEYED).lake
        assert state.changelog is not None
        assert state.batch is not None
        assert _changes(client) == changes
        go_on(client, lake, log, keyed)
        assert _changes(client) > changes
        assert lake.judged(f"{KEYED}$batch") == keyed


def _changes(client: StreamhouseClient) -> int:
    state = client.table_state(KEYED)
    assert state.lake.changelog is not None
    return sum(state.lake.changelog.tiered_offsets.values())


def test_a_batch_layout_that_lags_is_left_behind(lake: Lake) -> None:
    layout = {
        "table.datalake.batch-layout.sort": "name",
        "table.datalake.batch-layout.freshness": "1h",
    }
    with lake.service("a") as (_, client):
        filled(client, **layout)
        with lake.table(f"{KEYED}$batch") as table:
            first = table.metadata.snapshots[0].snapshot_id
            table.manage_snapshots().rollback_to_snapshot(first).commit()
        keyed = by_id(_lake_rows(lake, KEYED))
    lake.lose("a")

    with lake.service("b") as (_, client):
        client.create_database("shop")
        adopted = client.adopt_table(KEYED, force=True)
        assert adopted.left == (f"{KEYED}$batch",)
        assert not adopted.table.properties().has_batch_layout
        assert by_id(client.read(KEYED)) == keyed
        client.upsert(KEYED, rows(0, 5))
        tier_once(client, KEYED)
        assert lake.judged(KEYED) == keyed | by_id(rows(0, 5))


def _lake_rows(lake: Lake, name: str) -> pa.Table:
    with lake.table(name) as table:
        return table.scan(selected_fields=tuple(SCHEMA.names)).to_arrow()


def test_a_history_with_other_changes_than_the_rows_is_refused(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        filled(client, **{"table.datalake.changelog": "true"})
        with lake.table(f"{KEYED}$changelog") as table:
            first = table.metadata.snapshots[0].snapshot_id
            table.manage_snapshots().rollback_to_snapshot(first).commit()
    with lake.service("b") as (_, client):
        client.create_database("shop")
        with pytest.raises(
            UnsupportedError, match=r"items\$changelog' does not end where the rows"
        ):
            client.adopt_table(KEYED, force=True)
        assert client.list_tables() == []
