"""A table as its lake table tells of it."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.lake.tables._description import (
    description_of,
    table_described_by,
)

TABLE = TableInfo(
    descriptor=TableDescriptor(
        path=TablePath("db", "t"),
        schema=Schema.from_arrow(
            pa.schema([pa.field("id", pa.int64(), nullable=False), ("small", pa.int8())])
        ),
        primary_key=("id",),
        bucket_count=3,
        partitioned_by=(PartitionField.parse("truncate(4, id)"),),
        properties={"table.log.ttl": "1h"},
    ),
    table_id=7,
    created_at_us=123,
    nodes={0: "http://a", 1: "", 2: ""},
    adopted_from={2: {0: 5, 1: 0, 2: 9}},
)
PATH = TablePath("db", "t")


def test_everything_but_what_a_service_decides_comes_back() -> None:
    changed = change_schema(TABLE, [{"rename": "small", "to": "tiny"}, {"add": "x", "type": "int"}])

    found = table_described_by(
        description_of(changed), path=TablePath("other", "name"), table_id=9, created_at_us=4
    )

    descriptor = replace(changed.descriptor, path=TablePath("other", "name"))
    nodes = dict.fromkeys(range(3), "")
    wanted = replace(changed, descriptor=descriptor, table_id=9, created_at_us=4, nodes=nodes)
    assert found == wanted
    assert found.column_ids == {1, 2, 3}


def test_the_same_table_elsewhere_is_described_alike() -> None:
    elsewhere = replace(TABLE, table_id=8, created_at_us=99, nodes={})

    assert description_of(elsewhere) == description_of(TABLE)
    assert description_of(replace(TABLE, adopted_from={})) != description_of(TABLE)


def test_an_adopted_table_is_no_import_any_more() -> None:
    properties = {"table.import.source": "a b 1 2", "table.log.ttl": "2h"}
    imported = replace(TABLE, descriptor=replace(TABLE.descriptor, properties=properties))

    found = table_described_by(description_of(imported), path=PATH, table_id=9, created_at_us=4)

    assert found.descriptor.properties == {"table.log.ttl": "2h"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"schema": []}', '{"later": 1}'])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'db\.t': its property streamhouse\.table descr"):
        table_described_by(text, path=PATH, table_id=9, created_at_us=4)
