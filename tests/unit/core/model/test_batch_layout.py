"""The properties of a batch layout: what is read from them, and what is refused by name."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidSchemaError, StreamhouseError
from streamhouse.core.model.partitioning import (
    BATCH_PARTITION_PROPERTY,
    BATCH_SORT_PROPERTY,
    BatchLayout,
    Clustering,
)
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.schema import Schema

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("at", pa.timestamp("us", tz="UTC")),
            pa.field("region", pa.string()),
            pa.field("x", pa.float64()),
            pa.field("tags", pa.list_(pa.string())),
        ]
    )
)


def parse(partition: str = "", sort: str = "") -> BatchLayout | None:
    properties = {BATCH_PARTITION_PROPERTY: partition, BATCH_SORT_PROPERTY: sort}
    return BatchLayout.parse(properties, schema=SCHEMA, table="db.t")


def test_transforms_and_columns_are_read() -> None:
    layout = parse("day(at), bucket(16, id) , region", "region, `id`")

    assert layout is not None
    assert [str(f) for f in layout.partitioned_by] == ["day(at)", "bucket(16, id)", "region"]
    assert layout.clustering == Clustering(columns=("region", "id"))
    assert layout.columns == {"at", "id", "region"}


def test_a_z_order_of_up_to_four_columns() -> None:
    layout = parse(sort="ZORDER(id, x, region, at)")

    assert layout is not None
    assert layout.clustering == Clustering(columns=("id", "x", "region", "at"), is_z_order=True)


def test_nothing_asked_for_is_no_layout() -> None:
    assert parse() is None
    assert BatchLayout.parse({}, schema=SCHEMA, table="db.t") is None


@pytest.mark.parametrize(
    ("partition", "sort", "why"),
    [
        ("", "nope", "nope"),
        ("", "tags", r"batch-layout\.sort: column 'tags' has nested type"),
        ("", "id, id", "each once"),
        ("", "id,, x", "each once"),
        ("", "zorder(id)", "has 1 columns: zorder takes 2 to 4"),
        ("", "zorder(id, x, region, at, tags)", "has 5 columns"),
        ("day(region)", "", r"'day\(region\)' does not fit"),
        ("region, region", "", "has a field twice"),
        ("decade(at)", "", "unknown transform 'decade'"),
    ],
)
def test_what_cannot_be_is_refused(partition: str, sort: str, why: str) -> None:
    with pytest.raises(StreamhouseError, match=why):
        parse(partition, sort)


def test_a_renamed_column_is_renamed_in_the_layout() -> None:
    layout = parse("day(at), truncate(2, region)", "zorder(region, id)")
    assert layout is not None

    assert layout.renamed("region", "area") == {
        BATCH_PARTITION_PROPERTY: "day(at), truncate(2, area)",
        BATCH_SORT_PROPERTY: "zorder(area, id)",
    }


@pytest.mark.parametrize(("text", "ms"), [("round", 0), ("5min", 300_000)])
def test_its_freshness_is_that_of_rounds_or_its_own(text: str, ms: int) -> None:
    given = {"table.datalake.batch-layout.freshness": text, BATCH_SORT_PROPERTY: "id"}

    properties = TableProperties.parse(given, table="db.t")

    assert properties.datalake_batch_freshness_ms == ms
    assert properties.has_batch_layout


def test_a_freshness_that_is_none_is_refused() -> None:
    with pytest.raises(StreamhouseError, match=r"batch-layout\.freshness = 'soon'"):
        TableProperties.parse({"table.datalake.batch-layout.freshness": "soon"}, table="db.t")


def test_errors_are_those_of_schemas() -> None:
    with pytest.raises(InvalidSchemaError):
        parse(sort="tags")
