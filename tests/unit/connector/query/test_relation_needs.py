"""What a plan under Spark Connect needs of a table: enough, or nothing is said."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql.connect import functions as F
from pyspark.sql.connect import plan
from pyspark.sql.connect.column import Column

from streamhouse.connector.query._plan_needs import ScanNeeds
from streamhouse.connector.query._relation_needs import RelationTable, needs_of_relation

ALIAS = "streamhouse_" + "a" * 32
COLUMNS = ("id", "price", "Name", "at", "odd name", "größe")
ALWAYS = ("odd name", "größe")
"""Names that may be written in more ways than one are always read."""


def _table() -> Any:
    return plan.SubqueryAlias(plan.Read("t"), ALIAS)


def _needs(made: Any, *others: Any, has_usual_literals: bool = True) -> list[ScanNeeds] | None:
    """Return the needs of the one `Read` in a plan, and those of others."""
    reads = [_read_of(made), *others]
    known = {read._plan_id: RelationTable(f"k{n}", ALIAS, COLUMNS) for n, read in enumerate(reads)}
    found = needs_of_relation(made.plan(None), known, has_usual_literals=has_usual_literals)
    return None if found is None else list(found.scans)


def _read_of(made: Any) -> Any:
    while not isinstance(made, plan.Read):
        made = made._child
    return made


def _one(made: Any, **named: Any) -> tuple[set[str], tuple[str, ...]]:
    found = _needs(made, **named)
    assert found is not None
    return set(found[0].columns) - set(ALWAYS), found[0].conditions


def _selected(*columns: str) -> Any:
    return plan.Project(_table(), [F.col(column) for column in columns])


def _grouped(child: Any, by: list[Column], made: list[Column]) -> Any:
    return plan.Aggregate(child, "groupby", by, made, None, None, None)


def test_a_projection_and_a_condition_above_it_are_pushed() -> None:
    made = plan.Filter(_selected("id", "price"), (F.col("id") > 1) & F.col("price").isNotNull())

    assert _one(made) == ({"id", "price"}, ("(`id` > 1)", "isnotnull(`price`)"))


def test_a_condition_alone_reads_all_columns() -> None:
    made = plan.Filter(_table(), F.col(f"{ALIAS}.`name`").isin("a'b", "c"))

    found = _needs(made)

    assert found is not None
    assert found[0].columns == COLUMNS
    assert found[0].conditions == ("(`name` IN ('a\\'b', 'c'))",)
    assert _one(made, has_usual_literals=False)[1] == ()


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (F.col("price") <= F.lit(Decimal("0.05")), "(`price` <= 0.05BD)"),
        (F.col("at") == F.lit(datetime.date(2024, 1, 2)), "(`at` = DATE '2024-01-02')"),
        (~(F.col("id") == 1.5), "(NOT (`id` = CAST('1.5' AS DOUBLE)))"),
        (F.col("Name").startswith("x") | F.col("id").isNull(),
         "(startswith(`Name`, 'x') OR isnull(`id`))"),
        (F.col("id") < F.col("price"), "(`id` < `price`)"),
        (F.col("id") + 1 > 2, None),
        (F.col("at") < "now", None),
        (F.col("other.id") < 2, None),
        (F.lit(1) < 2, None),
        (F.col("id").eqNullSafe(None), None),
        (F.expr("id < 2"), None),
    ],
)  # fmt: skip
def test_a_condition_has_an_exact_text_or_none(condition: Column, text: str | None) -> None:
    assert _one(plan.Filter(_table(), condition))[1] == (() if text is None else (text,))


def test_rows_that_hang_together_are_all_read() -> None:
    above = F.col("id") > 1
    limited = plan.Limit(_selected("id"), 5)
    counted = _grouped(_table(), [F.col("id")], [F.count(F.lit(1))])
    renamed = plan.Project(_table(), [F.col("price").alias("id")])
    of_struct = _selected("place.id")

    assert _one(plan.Filter(limited, above)) == ({"id"}, ())
    assert _one(plan.Filter(counted, above)) == ({"id"}, ())
    assert _one(plan.Filter(renamed, above)) == ({"id", "price"}, ())
    assert _one(plan.Filter(of_struct, above))[1] == ()


def test_names_above_and_below_count() -> None:
    sorted_by = plan.Sort(_selected("id"), [F.col("NAME").asc()], is_global=True)

    assert _one(sorted_by) == ({"id", "Name"}, ())


@pytest.mark.parametrize(
    "columns",
    [
        [F.col("*")],
        [F.expr("id")],
        [F.col("id"), F.count("*")],
        [F.col("\u212aey")],
        [F.col("`a.*`")],
        [F.lit("\n")],
    ],
)
def test_all_columns_are_read_where_names_may_not_stand_in_the_plan(columns: list[Column]) -> None:
    assert _one(plan.Project(_table(), columns))[0] == {"id", "price", "Name", "at"}


def test_all_columns_are_read_of_a_table_that_is_shown_as_it_is() -> None:
    for made in (_table(), plan.Limit(_table(), 3), plan.Deduplicate(_table(), True)):
        assert _one(made) == ({"id", "price", "Name", "at"}, ())


def test_a_join_needs_what_is_named_of_both() -> None:
    left, right = plan.Filter(_selected("id"), F.col("id") > 1), _selected("id", "at")
    joined = plan.Project(plan.Join(left, right, ["id"], "inner"), [F.col("at")])

    found = _needs(joined, _read_of(right))

    assert found is not None
    assert [set(scan.columns) - set(ALWAYS) for scan in found] == [{"id", "at"}, {"id", "at"}]
    assert [scan.conditions for scan in found] == [("(`id` > 1)",), ()]


def test_nothing_is_said_of_relations_that_are_not_known() -> None:
    sampled = plan.Sample(_selected("id"), 0.0, 0.5, False, 1)

    assert _needs(plan.Filter(sampled, F.col("id") > 1)) is None
