"""Tables and records for tests of Kafka's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE, RecordColumns
from streamhouse.storage_service.kafka.values import SchemaSource, rows_of

__all__ = ["columns_of", "read_alone_and_among_many", "record_table"]


def record_table(
    schema: pa.Schema | Schema, key: tuple[str, ...] = (), **properties: str
) -> TableInfo:
    """Return a table; `value_format` is its property `kafka.value.format`, and so on."""
    descriptor = TableDescriptor(
        path=TablePath("default", "t"),
        schema=schema if isinstance(schema, Schema) else Schema.from_arrow(schema),
        primary_key=key,
        properties={f"kafka.{n.replace('_', '.')}": value for n, value in properties.items()},
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def columns_of(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    *,
    ms: Sequence[int] | None = None,
    headers: Sequence[Any] | None = None,
) -> RecordColumns:
    """Return records; without keys, timestamps and headers if none are given."""
    return RecordColumns(
        keys=pa.array([None] * len(values) if keys is None else keys, pa.binary()),
        values=pa.array(values, pa.binary()),
        timestamps_ms=np.array([-1] * len(values) if ms is None else ms, np.int64),
        headers=None if headers is None else pa.array(headers, HEADERS_TYPE),
    )


def read_alone_and_among_many(
    records: RecordColumns,
    info: TableInfo,
    *,
    bytes_max: int = 64 << 20,
    schemas: SchemaSource | None = None,
) -> CheckedRows:
    """Return records as rows: few are read one by one, many by whole columns, and both are same."""
    alone = rows_of(records, info, bytes_max=bytes_max, schemas=schemas)
    count, again = len(records), 20
    many = RecordColumns(
        keys=pa.concat_arrays([records.keys] * again),
        values=pa.concat_arrays([records.values] * again),
        timestamps_ms=np.tile(records.timestamps_ms, again),
        headers=None if records.headers is None else pa.concat_arrays([records.headers] * again),
    )
    found = rows_of(many, info, bytes_max=again * bytes_max, schemas=schemas)
    assert found.rows.equals(pa.concat_batches([alone.rows] * again)) or repr(
        found.rows.to_pylist()
    ) == repr(alone.rows.to_pylist() * again)
    assert found.positions.tolist() == [
        turn * count + number for turn in range(again) for number in alone.positions.tolist()
    ]
    assert [(at % count, misfit) for at, misfit in found.misfits.items()] == list(
        alone.misfits.items()
    ) * again
    return alone
