"""The lake expression of a random predicate accepts every row the predicate keeps.

Judged on rows, on the partition values of every transform, and on files' column bounds.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.conversions import to_bytes
from pyiceberg.expressions.visitors import _InclusiveMetricsEvaluator, expression_evaluator
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestFile,
    construct_partition_summaries,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.lake.files.partition_layout import (
    split_by_partition,
)
from streamhouse.lake.snapshots._partition_filter import PartitionFilter
from streamhouse.reading.where._iceberg_expression import to_iceberg_expression
from streamhouse.reading.where.predicate import Node, Predicate
from tests.support.examples import examples
from tests.support.predicate_model import (
    COLUMNS,
    SORT_KEY,
    TYPES,
    evaluate,
    leaves_of,
    nodes,
    rows,
    to_batch,
)

PRIMITIVES: dict[str, PrimitiveType] = {
    "flag": BooleanType(),
    "tiny": IntegerType(),
    "small": IntegerType(),
    "number": IntegerType(),
    "big": LongType(),
    "price": DecimalType(9, 2),
    "wide": DecimalType(38, 10),
    "ratio": FloatType(),
    "amount": DoubleType(),
    "name": StringType(),
    "other": StringType(),
    "raw": BinaryType(),
    "day": DateType(),
    "at": TimestamptzType(),
    "local": TimestampType(),
}
FIELD_IDS = {name: position for position, name in enumerate(PRIMITIVES, start=1)}
LAKE_SCHEMA = Schema(
    *(
        NestedField(FIELD_IDS[name], name, field_type, required=False)
        for name, field_type in PRIMITIVES.items()
    ),
    NestedField(
        50,
        "place",
        StructType(NestedField(51, "zone", IntegerType(), required=False)),
        required=False,
    ),
)
TIMES: list[Transform[Any, Any]] = [YearTransform(), MonthTransform(), DayTransform()]
TRANSFORMS: dict[str, list[Transform[Any, Any]]] = {
    "flag": [IdentityTransform()],
    "number": [IdentityTransform(), BucketTransform(4), TruncateTransform(10)],
    "big": [IdentityTransform(), BucketTransform(4), TruncateTransform(10)],
    "price": [IdentityTransform(), BucketTransform(4), TruncateTransform(50)],
    "amount": [IdentityTransform()],
    "name": [IdentityTransform(), BucketTransform(4), TruncateTransform(2)],
    "raw": [IdentityTransform(), BucketTransform(4)],
    "day": [IdentityTransform(), BucketTransform(4), *TIMES],
    "at": [IdentityTransform(), BucketTransform(4), *TIMES, HourTransform()],
    "local": [IdentityTransform(), BucketTransform(4), *TIMES, HourTransform()],
}
PARTITIONS = [(name, transform) for name, found in TRANSFORMS.items() for transform in found]


def _record(row: dict[str, Any]) -> Record:
    # pyiceberg's row evaluator cannot look into a NULL struct; to it, an empty one is the same.
    return Record(*(row[name] for name in PRIMITIVES), Record((row["place"] or {}).get("zone")))


def test_the_lake_schema_has_every_column_of_the_model() -> None:
    assert list(PRIMITIVES) == list(TYPES)


@given(nodes(), rows(size_max=6))
@settings(max_examples=examples(120))
def test_every_kept_row_is_accepted(node: Node, table_rows: list[dict[str, Any]]) -> None:
    accepts = expression_evaluator(
        LAKE_SCHEMA, to_iceberg_expression(Predicate(node)), case_sensitive=True
    )

    for row in table_rows:
        assert accepts(_record(row)) or evaluate(node, row) is not True


@pytest.mark.parametrize(("column", "transform"), PARTITIONS, ids=str)
def test_the_partition_of_every_kept_row_is_accepted(
    column: str, transform: Transform[Any, Any]
) -> None:
    spec = PartitionSpec(PartitionField(FIELD_IDS[column], 1000, transform, "part"))
    t = TYPES[column]

    @given(leaves_of(COLUMNS[column]), rows(size_max=4, only=column))
    @settings(max_examples=examples(30))
    def check(node: Node, table_rows: list[dict[str, Any]]) -> None:
        expression = to_iceberg_expression(Predicate(node))
        partitions = PartitionFilter({spec.spec_id: spec}, LAKE_SCHEMA, expression)
        for row in table_rows:
            if evaluate(node, row) is not True:
                continue
            written = _written(row, column, transform)
            for partition in (written, _wrapped(written, row[column], transform, t)):
                matches = partitions.matches(spec.spec_id, [(partition,)])
                assert matches is not None
                assert matches.all()
                assert partitions.may_match_manifest(_manifest(spec, [partition]))

    check()


def _manifest(spec: PartitionSpec, partitions: list[Any]) -> ManifestFile:
    records = [Record(partition) for partition in partitions]
    return ManifestFile.from_args(
        manifest_path="manifest.avro",
        partition_spec_id=spec.spec_id,
        partitions=construct_partition_summaries(spec, LAKE_SCHEMA, records),
    )


def _wrapped(written: Any, value: Any, transform: Transform[Any, Any], t: pa.DataType) -> Any:
    """Return the partition as other engines write it: what is below the type wraps around."""
    if not (isinstance(transform, TruncateTransform) and isinstance(value, int)):
        return written
    cut = value - value % transform.width
    return cut if cut >= -(1 << (t.bit_width - 1)) else cut + (1 << t.bit_width)


def _written(row: dict[str, Any], column: str, transform: Transform[Any, Any]) -> Any:
    """Return the partition that our own files of this row get."""
    name, _, parameter = str(transform).rstrip("]").partition("[")
    field = LakePartitionField(
        name="part", source=column, transform=name, parameter=int(parameter) if parameter else None
    )
    batch = to_batch([dict.fromkeys([*TYPES, "place"]) | row]).select([column])
    (found,) = split_by_partition(pa.Table.from_batches([batch]), [field], bucket=0)
    return found[0][0]


@given(st.lists(nodes(), min_size=1, max_size=10), rows(size_max=4))
@settings(max_examples=examples(60))
def test_a_file_that_is_pruned_has_no_kept_row(
    trees: list[Node], table_rows: list[dict[str, Any]]
) -> None:
    file = _data_file(table_rows)

    for node in trees:
        expression = to_iceberg_expression(Predicate(node))
        if not _InclusiveMetricsEvaluator(LAKE_SCHEMA, expression).eval(file):
            assert True not in [evaluate(node, row) for row in table_rows]


def _data_file(table_rows: list[dict[str, Any]]) -> DataFile:
    """Return a data file with the column metrics that a Parquet writer would give it."""
    bounds: dict[str, dict[int, Any]] = {"value": {}, "null": {}, "nan": {}, "low": {}, "high": {}}
    for name, field_type in PRIMITIVES.items():
        field_id = FIELD_IDS[name]
        found = [row[name] for row in table_rows]
        known = sorted((v for v in found if v is not None and v == v), key=SORT_KEY)
        bounds["value"][field_id] = len(found)
        bounds["null"][field_id] = found.count(None)
        if pa.types.is_floating(TYPES[name]):
            bounds["nan"][field_id] = sum(v is not None and v != v for v in found)
        if known:
            bounds["low"][field_id] = to_bytes(field_type, known[0])
            bounds["high"][field_id] = to_bytes(field_type, known[-1])
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path="file.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(table_rows),
        file_size_in_bytes=1,
        value_counts=bounds["value"],
        null_value_counts=bounds["null"],
        nan_value_counts=bounds["nan"],
        lower_bounds=bounds["low"],
        upper_bounds=bounds["high"],
    )
