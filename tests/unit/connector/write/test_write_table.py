"""A write creates its table as its options say, and goes to no other."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from streamhouse.connector.write._write_options import write_options
from streamhouse.connector.write._write_table import existing_or_created
from streamhouse.core.errors import InvalidRequestError, TableNotFoundError
from streamhouse.core.model.table import TableInfo
from tests.support.described_tables import DescribedTables

PATH = "shop.orders"
FRAME = pa.schema([("Id", pa.int64()), ("region", pa.string()), ("Total", pa.int64())])
CREATION = {
    "primary.key": "Id, region",
    "bucket.num": "4",
    "bucket.key": "Id",
    "partitioned.by": "bucket(16, Id), region",
    "table.log.ttl": "1d",
    "table.merge-engine": "aggregation",
    # Spark lowers option keys.
    "fields.total.agg": "sum",
}


def resolve(
    client: DescribedTables,
    schema: pa.Schema = FRAME,
    *,
    is_stream: bool = False,
    **options: str,
) -> TableInfo:
    given = write_options({"path": PATH, **options})
    return existing_or_created(client, given, schema, is_stream=is_stream)


def test_a_primary_key_table_is_created_as_the_options_say() -> None:
    descriptor = resolve(DescribedTables(), **CREATION).descriptor

    assert descriptor.primary_key == ("Id", "region")
    assert [column.nullable for column in descriptor.schema.columns] == [False, False, True]
    assert (descriptor.bucket_count, descriptor.bucket_key) == (4, ("Id",))
    assert [str(part) for part in descriptor.partitioned_by] == ["bucket(16, Id)", "region"]
    assert descriptor.merge_rules().aggregates["Total"].function == "sum"


def test_a_table_for_changes_has_none_of_the_changelogs_columns() -> None:
    changes = [("__change_type", pa.string()), ("__bucket", pa.int32()), ("__offset", pa.int64())]
    frame = pa.schema([*FRAME, *(pa.field(*change) for change in changes)])

    info = resolve(DescribedTables(), frame, **{"primary.key": "Id"})

    assert info.schema.names == FRAME.names


@pytest.mark.parametrize("options", [{"write.mode": "upsert"}, {"bucket.num": "2"}])
def test_changes_and_upserts_create_no_log_table(options: dict[str, str]) -> None:
    frame = FRAME.append(pa.field("__change_type", pa.string()))

    with pytest.raises(InvalidRequestError, match=r"'shop.orders' does not exist.*'primary.key'"):
        resolve(DescribedTables(), FRAME if "write.mode" in options else frame, **options)


@pytest.mark.parametrize("mode", ["delete", "partial"])
def test_what_changes_rows_creates_no_table(mode: str) -> None:
    with pytest.raises(TableNotFoundError):
        resolve(DescribedTables(), **CREATION, **{"write.mode": mode})


def test_options_that_describe_the_table_there_is_pass() -> None:
    client = DescribedTables()
    created = resolve(client, **CREATION)

    assert resolve(client, **CREATION) == created
    assert resolve(client, **{"table.log.ttl": "24h", "table.log.segment-bytes": "128mb"})


@pytest.mark.parametrize(
    ("option", "text", "actual"),
    [
        ("bucket.num", "8", "4"),
        ("bucket.key", "Id,region", "Id"),
        ("primary.key", "Id", "Id, region"),
        ("partitioned.by", "region", "bucket(16, Id), region"),
        ("table.log.ttl", "2d", "1d"),
        ("table.datalake.enabled", "false", "its default"),
        ("table.merge-engine", "last_row", "aggregation"),
        ("fields.total.agg", "max", "sum"),
    ],
)
def test_options_that_describe_another_table_are_refused(
    option: str, text: str, actual: str
) -> None:
    client = DescribedTables()
    resolve(client, **CREATION)
    options = CREATION | {option: text}
    if option == "table.merge-engine":
        del options["fields.total.agg"]

    with pytest.raises(InvalidRequestError) as caught:
        resolve(client, **options)

    message = caught.value.message
    assert f"'shop.orders' exists with {option.replace('total', 'Total')} = {actual}," in message
    assert "remove the option" in message


def test_the_bucket_key_of_a_log_table_is_part_of_what_it_is() -> None:
    client = DescribedTables()
    resolve(client)

    with pytest.raises(InvalidRequestError, match=r"bucket\.key = none, and this write says Id;"):
        resolve(client, **{"bucket.key": "Id"})
    with pytest.raises(InvalidRequestError, match=r"primary\.key = none"):
        resolve(client, **{"primary.key": "Id"})


def test_a_property_altered_meanwhile_does_not_end_a_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = DescribedTables()
    resolve(client, **CREATION)

    with caplog.at_level(logging.WARNING):
        resolve(client, is_stream=True, **CREATION | {"table.log.ttl": "5d"})

    assert "exists with table.log.ttl = 1d, and this write says 5d" in caplog.text
    with pytest.raises(InvalidRequestError, match=r"bucket\.num"):
        resolve(client, is_stream=True, **{"bucket.num": "5"})
