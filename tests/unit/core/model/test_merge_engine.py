"""Merge properties: what is read, and each combination that is refused, by its sentence."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.merge_engine import (
    Aggregate,
    ChangelogImage,
    DeleteBehavior,
    MergeEngine,
    MergeRules,
    is_merge_property,
)
from streamhouse.core.model.schema import Schema

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("total", pa.decimal128(10, 2)),
            pa.field("flag", pa.bool_()),
            pa.field("text", pa.string()),
            pa.field("seen", pa.timestamp("us", tz="UTC")),
            pa.field("tags", pa.list_(pa.string())),
        ]
    )
)
AGGREGATION = {"table.merge-engine": "aggregation"}
VERSION = "table.merge-engine.versioned.ver-column"


def parse(properties: dict[str, str], *, primary_key: tuple[str, ...] = ("id",)) -> MergeRules:
    return MergeRules.parse(properties, schema=SCHEMA, primary_key=primary_key, table="db.t")


def test_defaults() -> None:
    rules = parse({"table.log.ttl": "7d"})

    assert rules == MergeRules()
    assert rules.engine is MergeEngine.LAST_ROW
    assert rules.image is ChangelogImage.FULL
    assert rules.delete_behavior is DeleteBehavior.ALLOW


@pytest.mark.parametrize("engine", ["first_row", "aggregation"])
def test_deletes_are_ignored_where_rows_are_merged(engine: str) -> None:
    assert parse({"table.merge-engine": engine}).delete_behavior is DeleteBehavior.IGNORE


def test_versioned() -> None:
    rules = parse({"table.merge-engine": "versioned", VERSION: "seen"})

    assert rules.engine is MergeEngine.VERSIONED
    assert rules.version_column == "seen"
    assert rules.delete_behavior is DeleteBehavior.IGNORE


def test_every_column_outside_the_key_has_an_aggregate() -> None:
    rules = parse(
        AGGREGATION
        | {
            "fields.total.agg": "SUM",
            "fields.text.agg": "string_agg",
            "fields.text.listagg.delimiter": " | ",
            "fields.flag.agg": "bool_or",
            "table.delete.behavior": "allow",
        }
    )

    assert {name: a.function for name, a in rules.aggregates.items()} == {
        "total": Aggregate.SUM,
        "flag": Aggregate.BOOL_OR,
        "text": Aggregate.LISTAGG,
        "seen": Aggregate.LAST_NON_NULL,
        "tags": Aggregate.LAST_NON_NULL,
    }
    assert rules.aggregates["text"].delimiter == " | "
    assert rules.delete_behavior is DeleteBehavior.ALLOW


@pytest.mark.parametrize(
    ("properties", "sentence"),
    [
        ({"table.merge-engine": "first-row"}, "did you mean 'first_row'"),
        ({"table.changelog.image": "wal"}, "is not one of full, after"),
        ({"table.delete.behavior": "deny"}, "is not one of allow, ignore, disallow"),
        (
            {"table.merge-engine": "first_row", "table.delete.behavior": "allow"},
            "allow does not go with table.merge-engine = first_row",
        ),
        ({"table.merge-engine": "versioned"}, "needs table.merge-engine.versioned.ver-column"),
        ({VERSION: "seen"}, "needs table.merge-engine = versioned"),
        ({"table.merge-engine": "versioned", VERSION: "sen"}, "did you mean 'seen'"),
        ({"table.merge-engine": "versioned", VERSION: "id"}, "part of the primary key"),
        ({"table.merge-engine": "versioned", VERSION: "text"}, "'text' is string; use an integer"),
        ({"fields.total.agg": "sum"}, "needs table.merge-engine = aggregation"),
        (AGGREGATION | {"fields.totl.agg": "sum"}, "did you mean 'total'"),
        (AGGREGATION | {"fields.id.agg": "sum"}, "'id' is part of the primary key"),
        (AGGREGATION | {"fields.text.agg": "sum"}, "sum of column 'text' needs a number"),
        (AGGREGATION | {"fields.tags.agg": "max"}, "needs a type with an order"),
        (AGGREGATION | {"fields.total.agg": "count"}, "needs int or bigint"),
        (AGGREGATION | {"fields.total.agg": "bool_and"}, "needs boolean"),
        (AGGREGATION | {"fields.total.agg": "listagg"}, "needs string"),
        (AGGREGATION | {"fields.total.agg": "avg"}, "is not one of sum, min"),
        (
            AGGREGATION | {"fields.text.listagg.delimiter": ";"},
            "needs fields.text.agg = listagg",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(properties: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence) as caught:
        parse(properties)
    assert "'db.t'" in caught.value.message


def test_a_log_table_has_no_merge_properties() -> None:
    with pytest.raises(InvalidRequestError, match=r"changelog\.image needs a primary key"):
        parse({"table.changelog.image": "full"}, primary_key=())
    assert parse({"table.log.ttl": "1d"}, primary_key=()) == MergeRules()


def test_a_column_may_be_called_anything() -> None:
    assert is_merge_property("fields.a.b.agg")
    assert is_merge_property("fields.a.agg.agg")
    assert not is_merge_property("fields.agg")
    assert not is_merge_property("table.merge-engine.other")
