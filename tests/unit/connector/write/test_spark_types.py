"""Which columns a table gets of a schema of Spark's, and which types it refuses by name."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    CharType,
    LongType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from streamhouse.connector.write._spark_types import arrow_columns
from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.schema import Schema


def test_comments_of_columns_are_kept() -> None:
    schema = StructType(
        [
            StructField("id", LongType(), False, {"comment": "the key", "other": 1}),
            StructField("name", StringType()),
        ]
    )

    columns = arrow_columns(schema, table="db.t")

    assert [column.comment for column in Schema.from_arrow(columns).columns] == ["the key", ""]
    assert columns == pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])


def test_texts_of_a_limited_length_are_refused_by_name() -> None:
    for kind, named in ((VarcharType(3), r"VARCHAR\(3\)"), (CharType(3), r"CHAR\(3\)")):
        schema = StructType([StructField("tags", ArrayType(kind))])
        with pytest.raises(
            InvalidSchemaError, match=rf"'tags\.element' is {named}, .* write STRING"
        ):
            arrow_columns(schema, table="db.t")
