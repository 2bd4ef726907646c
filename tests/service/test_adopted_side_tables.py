"""The lake tables beside the rows' own, when a table goes on from its lake alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.maintain import command as maintain
from streamhouse.core.errors import UnsupportedError
from tests.support.adoption_world import KEYED, LOG, SCHEMA, Lake, adopt, by_id, filled, go_on, rows
from tests.support.command_line import streamhouse as streamhouse_command
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


def test_a_batch_layout_that_lags_is_made_anew(lake: Lake) -> None:
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
        client.adopt_table(KEYED, force=True)
        assert client.table_state(KEYED).lake.batch is None
        assert by_id(client.read(KEYED)) == keyed
        client.upsert(KEYED, rows(0, 5))
        tier_once(client, KEYED)
        keyed |= by_id(rows(0, 5))
        assert by_id(client.read(KEYED)) == keyed
        assert lake.judged(KEYED) == keyed
        assert lake.judged(f"{KEYED}$batch") == keyed


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


def _adopt_log(client: StreamhouseClient) -> None:
    client.create_database("shop")
    client.adopt_table(LOG, force=True)
    assert client.table_state(LOG).lake.batch is not None


def _ends_of_lost_rows(client: StreamhouseClient) -> dict[int, tuple[int, int]]:
    """Where each bucket's overwritten rows end, and its expired ones."""
    positions = client.positions(LOG)
    return {bucket: (at.truncated_offset, at.expired_offset) for bucket, at in positions.items()}


def test_rows_that_were_overwritten_stay_gone(lake: Lake) -> None:
    layout = {"table.datalake.batch-layout.sort": "name"}
    with lake.service("a") as (_, client):
        client.create_database("shop")
        client.create_table(LOG, SCHEMA, bucket_count=2, properties=layout)
        client.append(LOG, rows(0, 500))
        client.append(LOG, rows(500, 600))
        tier_once(client)
        with client.begin_transaction(LOG, operation="overwrite") as transaction:
            transaction.commit([transaction.stage(rows(1_000, 1_050))])
        tier_once(client)
        before = _ends_of_lost_rows(client)
        assert any(overwritten for overwritten, _ in before.values())
    lake.lose("a")

    log = by_id(rows(1_000, 1_050))
    for name in ("b", "c"):
        with lake.service(name) as (_, client):
            _adopt_log(client)
            assert _ends_of_lost_rows(client) == before
            assert by_id(client.read(LOG)) == log
            start = 2_000 + len(log)
            client.append(LOG, rows(start, start + 30))
            log |= by_id(rows(start, start + 30))
            tier_once(client)
            assert by_id(client.read(LOG)) == log
            assert lake.judged(LOG) == log
            assert lake.judged(f"{LOG}$batch") == log
        with lake.service(name) as (_, client):
            assert by_id(client.read(LOG)) == log
        lake.lose(name)


def test_rows_that_have_expired_stay_gone_from_both_layouts(lake: Lake) -> None:
    layout = {
        "table.datalake.batch-layout.sort": "name",
        "table.datalake.ttl": "1ms",
        "table.datalake.auto-maintenance": "false",
    }
    with lake.service("a") as (_, client):
        client.create_database("shop")
        client.create_table(LOG, SCHEMA, bucket_count=2, properties=layout)
        client.append(LOG, rows(0, 500))
        tier_once(client, LOG)
        client.alter_properties(LOG, updates={"table.datalake.ttl": "1h"})
        assert by_id(client.read(LOG)) == by_id(rows(0, 500))
        client.alter_properties(LOG, updates={"table.datalake.ttl": "1ms"})
        found = CliRunner().invoke(maintain, [LOG, "--endpoint", client.endpoint])
        assert found.exit_code == 0, found.output
        client.alter_properties(LOG, updates={"table.datalake.ttl": "1h"})
        client.append(LOG, rows(500, 600))
        tier_once(client, LOG)
        before = _ends_of_lost_rows(client)
        # Every bucket's rows that were in the lake are gone, and only those.
        assert sum(expired for _, expired in before.values()) == 500
        young = by_id(rows(500, 600))
        assert by_id(client.read(LOG)) == by_id(client.read(f"{LOG}$lake")) == young
        assert lake.judged(LOG) == lake.judged(f"{LOG}$batch") == young
    lake.lose("a")

    with lake.service("b") as (_, client):
        _adopt_log(client)
        assert _ends_of_lost_rows(client) == before
        assert by_id(client.read(LOG)) == young
        client.append(LOG, rows(600, 610))
        tier_once(client, LOG)
        young |= by_id(rows(600, 610))
        assert by_id(client.read(LOG)) == lake.judged(f"{LOG}$batch") == young
    given = [f"--catalog-property={key}={value}" for key, value in lake.properties.items()]
    streamhouse_command("check", "--data-dir", lake.folder / "b", "--lake-rows", *given)
