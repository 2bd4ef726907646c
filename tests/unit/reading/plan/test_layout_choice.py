"""Which layout a batch read takes, and what it estimates by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.schema import Schema
from streamhouse.lake.files.bounds import ColumnStatistics
from streamhouse.reading.files._file_pruning import UNKNOWN_SHARE, read_share
from streamhouse.reading.options.options import BATCH, as_options, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.scan.scan import LakePiece
from streamhouse.reading.where.parser import parse_predicate
from tests.support.union_world import UnionWorld

ROWS = 100_000
SCHEMA = pa.schema([pa.field("n", pa.int64()), pa.field("payload", pa.float64())])
SORT = {"table.datalake.batch-layout.sort": "n"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, properties=SORT)
        _append(opened, ROWS)
        opened.tiering.tier()
        yield opened


def _append(world: UnionWorld, count: int) -> None:
    random = np.random.default_rng(1)
    columns = [pa.array(random.permutation(count)), pa.array(random.random(count))]
    world.tiering.service.append(world.PATH, 0, pa.record_batch(columns, schema=SCHEMA))


def _layout(world: UnionWorld, name: str = UnionWorld.PATH, **options: Any) -> str:
    """Return the lake table whose files a read plans."""
    given = as_options(options) | {"table": name, "endpoint": "http://memory"}
    state = world.state()
    output = output_columns(state.table.schema, columns=None, include_metadata=False, table="t")
    plan = plan_batch_read(world.client, state, read_options(given, use=BATCH), output)
    pieces = [piece for split in plan.splits for piece in split.pieces]
    paths = {Path(p.path).parts[-4] for p in pieces if isinstance(p, LakePiece)}
    (found,) = paths
    return found


def test_a_narrow_filter_takes_the_layout_sorted_for_it(world: UnionWorld) -> None:
    assert _layout(world, where="n >= 100 AND n < 200") == "t$batch"
    found = world.read(where="n >= 100 AND n < 200")
    assert sorted(found["n"].to_pylist()) == list(range(100, 200))


def test_other_reads_take_the_stream_ordered_table(world: UnionWorld) -> None:
    assert _layout(world) == "t"
    assert _layout(world, where="payload < 0.001") == "t"
    assert _layout(world, "db.t$lake", where="n = 7") == "t"
    assert _layout(world, where="n = 7", startingOffsets='{"0": 10}') == "t"
    snapshot_id = world.state().lake.snapshot_id
    assert _layout(world, where="n = 7", asOfSnapshot=snapshot_id) == "t"


def test_a_long_tail_speaks_for_the_layout_that_is_ahead(world: UnionWorld) -> None:
    _append(world, ROWS)
    world.tiering.round(replace(world.tiering.claim(), is_batch_due=False)).run()

    assert _layout(world, where="n < 100") == "t"
    assert len(world.read(where="n < 100")) == 200


def test_a_layout_that_somebody_dropped_is_not_needed(world: UnionWorld) -> None:
    world.tiering.lake_table("db.t$batch").catalog.drop_table("db.t$batch")

    assert _layout(world, where="n = 7") == "t"


def test_a_layout_whose_tail_has_left_the_log_is_not_used(world: UnionWorld) -> None:
    _append(world, 1_000)
    world.tiering.round(replace(world.tiering.claim(), is_batch_due=False)).run()
    world.expire_log(0, ROWS + 500)

    assert _layout(world, where="n = 7") == "t"
    assert len(world.read(where="n = 7")) == 2


def _share(where: str, clustering: Clustering, groups: int, **bounds: tuple[Any, Any]) -> float:
    types = {"a": pa.int64(), "f": pa.float64(), "d": pa.decimal128(9, 2), "s": pa.string()}
    schema = Schema.from_arrow(pa.schema([pa.field(k, t) for k, t in types.items()]))
    statistics = {
        name: ColumnStatistics(minimum=low, maximum=high, null_count=0, row_count=1_000)
        for name, (low, high) in bounds.items()
    }
    predicate = parse_predicate(where, schema, table="t")
    return read_share(predicate, statistics, clustering, row_groups=groups)


def test_the_share_of_row_groups_is_guessed_from_the_files_range() -> None:
    by_a, by_f = Clustering(columns=("a", "f")), Clustering(columns=("f",))

    assert _share("a < 10", by_a, 8, a=(0, 79)) == pytest.approx(1 / 8, abs=1 / 8)
    assert _share("a < 10", by_a, 1, a=(0, 79)) == 1.0
    assert _share("f < 10", by_a, 8, a=(0, 79), f=(0.0, 80.0)) == 1.0
    assert _share("f < 10", by_a, 8, a=(7, 7), f=(0.0, 80.0)) <= 0.25
    assert _share("f < 10", by_f, 8, f=(0.0, 80.0)) <= 0.25
    # NaN is larger than every number, and may be anywhere.
    assert _share("f > 70", by_f, 8, f=(0.0, 80.0)) == 1.0
    assert _share("d > 70", Clustering(columns=("d",)), 8, d=(Decimal(0), Decimal(80))) <= 0.25
    assert _share("s = 'x'", Clustering(columns=("s",)), 8, s=("a", "z")) == UNKNOWN_SHARE
    assert _share("a < 10", by_a, 8) == 1.0


def test_along_a_z_order_every_column_counts() -> None:
    curve = Clustering(columns=("a", "f"), is_z_order=True)

    one = _share("a < 10", curve, 16, a=(0, 79), f=(0.0, 80.0))
    both = _share("a < 10 AND f < 10", curve, 16, a=(0, 79), f=(0.0, 80.0))

    assert (one, both) == (0.25, 0.0625)
