"""Which conditions of DuckDB become conditions of `where`, and that no other does."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from streamhouse.reading.duckdb._arrow_filter import Condition, condition_of

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("share", pa.float32()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("raw", pa.binary()),
        pa.field("place", pa.struct([pa.field("zone", pa.int32())])),
    ]
)
MOMENT = dt.datetime(2024, 1, 2, 3, 4, 5, 6)


def _scalar(value: Any, name: str) -> Any:
    return pa.scalar(value, SCHEMA.field(name).type)


@pytest.mark.parametrize(
    ("kept", "where"),
    [
        (pc.field("id") > -5, "`id` > -5"),
        (pc.field("id") == 5, "`id` = 5"),
        (pc.field("id") != 5, "`id` != 5"),
        (pc.field("name") <= "it's (a) = b", "`name` <= 'it\\'s (a) = b'"),
        (pc.field("name") == "", "`name` = ''"),
        (pc.field("share") >= 1e-7, "`share` >= 1e-7D"),
        (pc.field("day") < _scalar(MOMENT.date(), "day"), "`day` < DATE'2024-01-02'"),
        (
            pc.field("at") > _scalar(MOMENT, "at"),
            "`at` > TIMESTAMP'2024-01-02 03:04:05.000006Z'",
        ),
        (
            pc.field("local") > _scalar(MOMENT, "local"),
            "`local` > TIMESTAMP_NTZ'2024-01-02 03:04:05.000006'",
        ),
        (
            (pc.field("id") > 1) & ((pc.field("id") < 9) | (pc.field("name") == "a")),
            "(`id` > 1 AND (`id` < 9 OR `name` = 'a'))",
        ),
        (pc.is_in(pc.field("id"), pa.array([3, -4])), "`id` IN (3, -4)"),
        (pc.is_in(pc.field("name"), pa.array(["a", "b c"])), "`name` IN ('a', 'b c')"),
    ],
)
def test_what_is_understood_is_exact(kept: pc.Expression, where: str) -> None:
    assert condition_of(str(kept), SCHEMA) == Condition(where, is_exact=True)


@pytest.mark.parametrize(
    "kept",
    [
        pc.field("name") == 'a "quoted" name',
        pc.field("name") == "a\\b",
        pc.field("name") == "a\nb",
        pc.field("raw") == b"a",
        pc.field("share") > float("inf"),
        pc.is_nan(pc.field("share")),
        pc.field("place", "zone") == 3,
        pc.field("id").is_null(),
        ~(pc.field("id") == 3),
        (pc.field("id") == 3) & (pc.field("place", "zone") == 3),
        pc.field("unknown") == 3,
        pc.field("id") == pc.field("share"),
        pc.is_in(pc.field("id"), pa.array([1, None])),
        # Arrow's text leaves out the middle of a long list.
        pc.is_in(pc.field("id"), pa.array(range(100))),
        pc.is_in(pc.field("name"), pa.array(["a,\nb"])),
        pc.field("day") > pa.scalar(-1_000_000, pa.int32()).cast(pa.date32()),
        pc.field("at") > pa.scalar(1 << 60, pa.int64()).cast(pa.timestamp("us", "UTC")),
    ],
)
def test_what_is_not_understood_is_left_to_arrow(kept: pc.Expression) -> None:
    assert condition_of(str(kept), SCHEMA) == Condition(None, is_exact=False)


def test_names_that_could_be_read_as_more_than_names_are_left_to_arrow() -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("id == 1) or (id", pa.int64())])
    kept = pc.field("id == 1) or (id") == 2
    assert condition_of(str(kept), schema) == Condition(None, is_exact=False)
