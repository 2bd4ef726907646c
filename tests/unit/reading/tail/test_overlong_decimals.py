"""A decimal in the log that no lake can hold, from a service of the past, stops no rounds."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnsupportedError
from tests.support.extreme_values import decimals
from tests.support.tiering_world import TieringWorld


@pytest.mark.parametrize("precision", [5, 18, 20, 38])
def test_it_is_null_in_the_lake_and_the_log_says_where_it_was(
    world: TieringWorld, caplog: pytest.LogCaptureFixture, precision: int
) -> None:
    t = pa.decimal128(precision, 2)
    most = 10**precision - 1
    rows = pa.record_batch({"v": decimals(t, 100, -(2**127), most), "n": pa.array([1, None, 3])})
    world.create_table(schema=rows.schema)
    world.service.append("db.t", 0, rows)

    world.tier()

    found = world.lake_table().scan().to_arrow().sort_by("__offset")
    assert found["v"].to_pylist() == [Decimal("1.00"), None, rows["v"][2].as_py()]
    assert f"column=v why='with more digits than decimal({precision},2)" in caplog.text
    assert "offset=1" in caplog.text


@pytest.mark.parametrize("is_nested", [True, False])
def test_where_no_null_can_be_the_round_names_the_row(world: TieringWorld, is_nested: bool) -> None:
    column = decimals(pa.decimal128(38, 2), 1, 2, -(2**127))
    if is_nested:
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), column)
    schema = pa.schema([pa.field("v", column.type, nullable=is_nested)])
    world.create_table(schema=schema)
    world.service.append("db.t", 0, pa.record_batch([column], schema=schema))

    with pytest.raises(UnsupportedError, match=r"column 'v' has a value .* at offset 2, and no"):
        world.tier()
