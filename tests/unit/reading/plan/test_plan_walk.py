"""Planning goes through the files of the room once: a reader follows it without going back.

The files of `where/` are left out of the count: a plan with a predicate enters them many times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan import batch_read
from streamhouse.reading.plan.row_form import table_columns
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld

_ROOM = str(Path(batch_read.__file__).parent.parent)
_PREDICATES = str(Path(_ROOM, "where"))
_RETURNS_MAX = 8


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        for bucket in (0, 1):
            opened.append(bucket, rows(0, 30))
        opened.tiering.tier()
        for bucket in (0, 1):
            opened.append(bucket, rows(30, 30))
        yield opened


@pytest.mark.parametrize("where", [None, "id > 5 AND id < 50 OR id IN (52, 53)"])
@pytest.mark.parametrize("part", ["", "$lake", "$log"])
def test_a_batch_plan_seldom_returns_to_a_file(
    world: UnionWorld, part: str, where: str | None
) -> None:
    state = world.state()
    output = table_columns(state.table, columns=None, include_metadata=False, has_change_type=False)
    given = {"table": f"{UnionWorld.PATH}{part}", "endpoint": "http://memory"}
    given |= {} if where is None else {"where": where}
    options = read_options(given, use=BATCH)
    # The first plan of a process loads modules.
    batch_read.plan_batch_read(world.client, state, options, output)
    files: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        # A predicate is asked as a value is: nobody opens its files to follow the plan.
        is_of_plan = file.startswith(_ROOM) and not file.startswith(_PREDICATES)
        if event == "call" and is_of_plan and files[-1:] != [file]:
            files.append(file)

    sys.setprofile(called)
    try:
        batch_read.plan_batch_read(world.client, state, options, output)
    finally:
        sys.setprofile(None)

    assert len(set(files)) > 3
    assert len(files) - len(set(files)) < _RETURNS_MAX, files
