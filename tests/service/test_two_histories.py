"""An old copy or a twin of a data directory never replaces rows that the lake has."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient, TieringIdle
from streamhouse.core.errors import (
    HistoryDivergedError,
    StreamhouseError,
    TableExistsError,
)
from tests.support.adoption_world import KEYED, LOG, SCHEMA, Lake, Rows, by_id, rows
from tests.support.python_process import run_python
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


def _create(client: StreamhouseClient) -> None:
    client.create_database("shop")
    client.create_table(LOG, SCHEMA)
    client.create_table(KEYED, SCHEMA, primary_key=["id"])


def _write(client: StreamhouseClient, start: int, end: int, *, mark: str) -> None:
    client.append(LOG, rows(start, end, mark=mark))
    client.upsert(KEYED, rows(start, end, mark=mark))


def _copy(lake: Lake, source: str, target: str) -> None:
    shutil.copytree(lake.folder / source, lake.folder / target)


def _live_twice(lake: Lake, first: str, second: str, *, rows_both: int) -> None:
    """Give two data directories the same two tables, all of whose rows are in the lake."""
    with lake.service(first) as (service, client):
        _create(client)
        _write(client, 0, rows_both, mark="both")
        tier_once(client)
        service.terminate()
    _copy(lake, first, second)


def _outgrown(lake: Lake) -> tuple[Rows, Rows]:
    """Give directory `old` what `now` had before it brought more rows to the lake.

    Return the rows of both then, and those of `now` at last.
    """
    _live_twice(lake, "now", "old", rows_both=500)
    with lake.service("now") as (service, client):
        both = by_id(client.read(LOG))
        _write(client, 500, 600, mark="now")
        tier_once(client)
        now = by_id(client.read(LOG))
        service.terminate()
    assert (len(both), len(now)) == (500, 600)
    return both, now


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(HistoryDivergedError, match="the lake has") as refused:
        call()
    return refused.value.message


def _check_refused(client: StreamhouseClient, table: str, in_lake: Rows) -> None:
    """What writes, tiers, or reads the log with the lake says why not; the lake alone is read."""
    write = client.append if table == LOG else client.upsert
    before = client.positions(table)
    _refused(lambda: tier_once(client, table))
    _refused(lambda: write(table, rows(0, 1)))
    kind = "append" if table == LOG else "upsert"
    _refused(lambda: client.begin_transaction(table, operation=kind))
    _refused(lambda: client.read(table))
    assert by_id(client.read(f"{table}$lake")) == in_lake
    assert client.read(f"{table}$log").num_rows > 0
    assert client.positions(table) == before


def test_an_old_copy_is_refused_and_stays_so(lake: Lake) -> None:
    both, now = _outgrown(lake)

    with lake.service("old") as (service, client):
        # Of one table the lake is ahead of the log, of the other the log has gone past it.
        _refused(lambda: client.read(LOG))
        _refused(lambda: tier_once(client, LOG))
        client.upsert(KEYED, rows(500, 650, mark="old"))
        _refused(lambda: client.read(KEYED))
        for table in (LOG, KEYED):
            _check_refused(client, table, both)
        service.kill()
    with lake.service("old") as (_, client):
        for table in (LOG, KEYED):
            _check_refused(client, table, both)
            answer = StorageClient.of(client).claim_tiering("w", tables=[table], force=True)
            assert isinstance(answer, TieringIdle)
            assert answer.reason == "history_diverged"
    with lake.service("now") as (_, client):
        assert by_id(client.read(LOG)) == by_id(client.read(KEYED)) == now
        _write(client, 600, 601, mark="later")
        tier_once(client)
        assert len(by_id(client.read(LOG))) == len(by_id(client.read(KEYED))) == 601


def test_of_twins_only_one_tiers(lake: Lake) -> None:
    """Both have the same epochs and offsets, but other rows."""
    with lake.service("one") as (service, client):
        _create(client)
        _write(client, 0, 50, mark="both")
        service.terminate()
    _copy(lake, "one", "other")
    with lake.service("one") as (_, one), lake.service("other") as (_, other):
        # What both have is harmless, whoever brings it.
        tier_once(one)
        tier_once(other)
        assert by_id(other.read(LOG)) == by_id(one.read(LOG))
        _write(one, 50, 60, mark="one")
        _write(other, 50, 60, mark="other")
        tier_once(one)
        for table in (LOG, KEYED):
            _refused(functools.partial(tier_once, other, table))
        _write(one, 60, 70, mark="one")
        tier_once(one)
        expected = by_id(rows(0, 50, mark="both")) | by_id(rows(50, 70, mark="one"))
        assert by_id(one.read(LOG)) == by_id(one.read(KEYED)) == expected


def test_the_lakes_history_may_be_chosen(lake: Lake) -> None:
    """It says first what that keeps and what not, and deletes nothing."""
    _, now = _outgrown(lake)

    with lake.service("old") as (service, client):
        with pytest.raises(TableExistsError, match="has the history of the table"):
            client.lake_divergence(LOG)
        _write(client, 500, 530, mark="old")
        for table in (LOG, KEYED):
            _refused(functools.partial(client.read, table))
            old_id = client.describe_table(table).table_id
            before = sorted(
                p.name for p in (lake.folder / "old" / "tables" / str(old_id)).iterdir()
            )
            said = _streamhouse("adopt", table, "--endpoint", service.endpoint)
            assert said.returncode != 0, "nobody said yes"
            assert (
                "bucket 0: kept are offsets 0 to 500, which both have, and 500 to 600 as the lake"
                " has them; lost to the table are the 30 rows at 500 to 530 as this log has them"
            ) in said.stdout
            assert f"tables/{old_id}.given-up of the data directory" in said.stdout
            _refused(functools.partial(client.read, table))

            # The other service tiered a moment ago.
            said = _streamhouse("adopt", table, "--yes", "--endpoint", service.endpoint)
            assert "stop that service for good" in said.stderr
            said = _streamhouse("adopt", table, "--yes", "--force", "--endpoint", service.endpoint)
            assert "from these offsets on: 0: 600" in said.stdout, said.stderr
            aside = lake.folder / "old" / "tables" / f"{old_id}.given-up"
            assert sorted(path.name for path in aside.iterdir()) == before
            assert by_id(client.read(table)) == now
        found = client.lookup(KEYED, pa.table({"id": [510, 520]}))
        assert found["name"].to_pylist() == ["now510", "now520"]
        _write(client, 600, 610, mark="adopted")
        tier_once(client)
        service.terminate()
    assert _check(lake, "old").returncode == 0
    with lake.service("old") as (_, client):
        for table in (LOG, KEYED):
            assert by_id(client.read(table)) == now | by_id(rows(600, 610, mark="adopted"))
    # What the lake was taken from can tier no more.
    with lake.service("now") as (_, client):
        _write(client, 600, 601, mark="now")
        for table in (LOG, KEYED):
            with pytest.raises(StreamhouseError, match="another streamhouse table"):
                tier_once(client, table)


def test_a_check_finds_the_other_history(lake: Lake) -> None:
    _live_twice(lake, "now", "old", rows_both=50)
    for name, mark in (("now", "now"), ("old", "old")):
        with lake.service(name) as (service, client):
            _write(client, 50, 80, mark=mark)
            if name == "now":
                tier_once(client)
            service.terminate()

    assert _check(lake, "now").returncode == 0
    found = _check(lake, "old")
    assert found.returncode == 1
    assert found.stdout.count("the lake has other rows below offset 80 than the log") == 2


def _check(lake: Lake, name: str) -> subprocess.CompletedProcess[str]:
    given = [f"--catalog-property={key}={value}" for key, value in lake.properties.items()]
    return _streamhouse("check", "--data-dir", str(lake.folder / name), "--lake-rows", *given)


def _streamhouse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", "from streamhouse.cli import main; main()", *arguments])


def test_the_logs_history_may_be_chosen_by_rolling_the_lake_back(lake: Lake) -> None:
    with lake.service("now") as (service, client):
        _create(client)
        client.append(LOG, rows(0, 50, mark="both"))
        tier_once(client, LOG)
        both = client.table_state(LOG).lake.snapshot_id
        service.terminate()
    _copy(lake, "now", "old")
    with lake.service("now") as (service, client):
        client.append(LOG, rows(50, 60, mark="now"))
        tier_once(client, LOG)
        service.terminate()

    with lake.service("old") as (service, client):
        client.append(LOG, rows(50, 80, mark="old"))
        _refused(functools.partial(client.read, LOG))
        with lake.table(LOG) as table:
            assert both is not None
            table.manage_snapshots().set_current_snapshot(both).commit()
        said = _streamhouse("adopt", LOG, "--yes", "--force", "--endpoint", service.endpoint)
        assert "its lake has the history of its log again" in said.stdout, said.stderr
        client.append(LOG, rows(80, 90, mark="old"))
        tier_once(client, LOG)
        expected = by_id(rows(0, 50, mark="both")) | by_id(rows(50, 90, mark="old"))
        assert by_id(client.read(LOG)) == by_id(client.read(f"{LOG}$lake")) == expected
