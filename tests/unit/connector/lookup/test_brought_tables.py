"""What a task does with the table of an earlier cut: brings it up to its own, or reads anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamhouse.connector.lookup._shared_tables import SharedTables
from streamhouse.connector.lookup._table_cut import PlannedTable
from streamhouse.connector.lookup._whole_rows import SharedCut
from streamhouse.core.model.table_state import TableState
from tests.support.lookup_life import KEYS, ROWS, LookupLife


@pytest.fixture
def life(tmp_path: Path) -> Iterator[LookupLife]:
    """A table of integers that was looked up once."""
    with LookupLife(tmp_path, "close integers") as life:
        life.fill()
        assert life.looked_up() == ["read"]
        yield life


@pytest.mark.parametrize("kind", KEYS)
def test_after_few_changes_only_these_are_read(kind: str, tmp_path: Path) -> None:
    with LookupLife(tmp_path, kind) as life:
        life.fill()
        assert life.looked_up() == ["read"]
        life.table.upsert(life.row(5, name="new", n=50))
        assert life.looked_up() == ["brought"]
        # So little is not written: the next task brings it again, and the changes since.
        life.table.upsert(life.row(5, name="newer", n=51), life.row(ROWS, n=1, name="more"))
        life.table.delete(life.row(6))
        assert life.looked_up() == ["brought"]
        assert life.looked_up() == []
        # A deleted key comes back, a new one goes.
        life.table.upsert(life.row(6, name="back", n=7))
        life.table.delete(life.row(ROWS))
        assert life.looked_up() == ["brought"]


def test_what_is_brought_far_is_written_once_and_is_as_old_as_what_was_read(
    life: LookupLife,
) -> None:
    (read,) = life.directory.iterdir()
    os.utime(read, (read.stat().st_mtime - 20, read.stat().st_mtime - 20))
    life.table.upsert(*(life.row(i, name="new", n=i + 1) for i in range(3)))

    assert life.looked_up() == ["brought"]
    assert life.looked_up() == []

    (written,) = set(life.directory.iterdir()) - {read}
    assert written.stat().st_mtime_ns == read.stat().st_mtime_ns
    # The next task begins there: the changes since the table was read would be too many.
    life.table.upsert(life.row(9, name="new", n=10))
    assert life.looked_up() == ["brought"]
    late = SharedTables(life.directory, clock=lambda: written.stat().st_mtime + 60)
    assert late.load_once(life.cut()).values.rows.num_rows == ROWS


def test_after_many_changes_the_table_is_read(life: LookupLife) -> None:
    life.table.upsert(*(life.row(i, name="new", n=i + 1) for i in range(5)))
    assert life.looked_up() == ["read"]


def test_of_what_was_brought_again_and_again_few_rows_are_unused(life: LookupLife) -> None:
    told = []
    for number in range(12):
        changed = [life.row(i, name=f"v{number}", n=number) for i in range(3)]
        life.table.upsert(*changed)
        told.append(life.looked_up())
    # Of 64 rows eight may have been replaced.
    assert told[:3] == [["brought"], ["brought"], ["not brought", "read"]]
    assert ["read"] not in told


@pytest.mark.parametrize("kind", ["close integers", "short texts"])
def test_a_key_of_another_kind_than_all_others_makes_it_read(kind: str, tmp_path: Path) -> None:
    with LookupLife(tmp_path, kind) as life:
        life.fill()
        life.looked_up()
        key: Any = 1 << 60 if kind == "close integers" else "a text that is no short one"
        life.table.upsert({"k0": key, "name": "other", "n": 1})
        assert life.looked_up() == ["not brought", "read"]
        assert life.looked_up() == []


def test_a_later_cut_is_as_good(life: LookupLife) -> None:
    earlier = life.cut()
    (path,) = life.directory.iterdir()
    life.table.upsert(*(life.row(i, name="new", n=i + 1) for i in range(3)))
    assert life.looked_up() == ["brought"]
    path.unlink()

    assert life.looked_up(earlier) == ["brought"]


def test_a_round_that_begins_changes_nothing(life: LookupLife) -> None:
    assert life.table.tiering.service.claim_tiering("somebody", tables=["db.t"]) is not None
    assert life.looked_up() == []
    life.table.upsert(life.row(5, name="new", n=50))
    assert life.looked_up() == ["brought"]


def test_after_a_round_the_table_is_read(life: LookupLife) -> None:
    life.table.tiering.tier()
    assert life.looked_up() == ["read"]


def _lost(state: TableState) -> TableState:
    at = {b: replace(at, log_start_offset=at.high_watermark) for b, at in state.positions.items()}
    return replace(state, positions=at)


def _back(state: TableState) -> TableState:
    (bucket, *_) = state.positions
    at = state.positions[bucket]
    return replace(state, positions={**state.positions, bucket: replace(at, high_watermark=0)})


def _cut_off(state: TableState) -> TableState:
    at = {b: replace(at, truncated_offset=1) for b, at in state.positions.items()}
    return replace(state, positions=at)


def _widened(state: TableState) -> TableState:
    return replace(state, table=replace(state.table, schema_id=state.table.schema_id + 1))


def _another(state: TableState) -> TableState:
    return replace(state, table=replace(state.table, table_id=state.table.table_id + 1))


def _unsafe(state: TableState) -> TableState:
    return replace(state, may_lose_rows=True)


def _ageing(state: TableState) -> TableState:
    properties = {**state.table.descriptor.properties, "table.datalake.ttl": "1 h"}
    descriptor = replace(state.table.descriptor, properties=properties)
    return replace(state, table=replace(state.table, descriptor=descriptor))


@pytest.mark.parametrize("change", [_lost, _back, _cut_off, _widened, _another, _unsafe, _ageing])
def test_only_changes_may_stand_between_two_cuts(
    change: Callable[[TableState], TableState], life: LookupLife
) -> None:
    before = PlannedTable(life.plan, life.table.union.client).cut()
    life.table.upsert(*(life.row(i, name="new", n=i + 1) for i in range(ROWS)))
    after = PlannedTable(life.plan, life.table.union.client).cut()
    assert after.since(before.place) == 2 * ROWS
    assert before.since(after.place) == 0

    changed = after._replace(state=change(after.state))

    assert changed.since(before.place) is None
    if change is _ageing:
        assert changed.since(changed.place) is None


@pytest.mark.parametrize("what", ["head", "rows", "cut short"])
def test_a_damaged_table_is_no_beginning(what: str, life: LookupLife) -> None:
    (path,) = life.directory.iterdir()
    content = bytearray(path.read_bytes())
    if what == "cut short":
        del content[len(content) // 2 :]
    else:
        content[40 if what == "head" else -100] ^= 1
    path.write_bytes(content)
    life.table.upsert(life.row(5, name="new", n=50))
    assert life.looked_up() == ["read"]


def test_another_tables_file_under_its_name_is_no_beginning(life: LookupLife) -> None:
    (path,) = life.directory.iterdir()
    other = replace(life.plan, endpoint="http://elsewhere")
    cut = life.cut()
    SharedTables(life.directory).load_once(SharedCut(other, cut.cut, cut.cut_name))
    (others,) = set(life.directory.iterdir()) - {path}
    shutil.copyfile(others, path)
    others.unlink()
    life.table.upsert(life.row(5, name="new", n=50))
    assert life.looked_up() == ["read"]
