"""A table's layout in the lake, in the notation of users.

Partitions: `region`, `day(event_time)`, `bucket(16, id)`. An optional second layout for batch
reads, in the properties:

    table.datalake.batch-layout.partition    day(event_time), bucket(16, device)
    table.datalake.batch-layout.sort         event_time, device    or    zorder(lat, lon)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, suggestion
from streamhouse.core.model.schema import Schema, type_name
from streamhouse.core.types.registry import type_of

__all__ = [
    "BATCH_PARTITION_PROPERTY",
    "BATCH_SORT_PROPERTY",
    "BatchLayout",
    "Clustering",
    "PartitionField",
]

BATCH_PARTITION_PROPERTY: Final = "table.datalake.batch-layout.partition"
BATCH_SORT_PROPERTY: Final = "table.datalake.batch-layout.sort"
Z_ORDER_COLUMNS_MAX: Final = 4
_Z_ORDER: Final = re.compile(r"\s*zorder\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_COMMA_OUTSIDE_CALLS: Final = re.compile(r",(?![^()]*\))")

_TIME_TRANSFORMS: Final = ("year", "month", "day", "hour")
_PLURALS: Final = {
    "years": "year",
    "months": "month",
    "days": "day",
    "hours": "hour",
    "date": "day",
}
_PARAMETER_TRANSFORMS: Final = ("bucket", "truncate")
_TEXT_MAX: Final = 1_000
_DIGITS_MAX: Final = 10
_CALL: Final = re.compile(r"\s*([A-Za-z_]+)\s*\(\s*(?:(\d+)\s*,\s*)?(.+?)\s*\)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionField:
    """One Iceberg partition field: a transform of one column.

    `transform` is identity, year, month, day, hour, bucket or truncate; `parameter` is the N of
    bucket and the width of truncate, otherwise None.
    """

    column: str
    transform: str = "identity"
    parameter: int | None = None

    @classmethod
    def parse(cls, text: str) -> PartitionField:
        """Read one partition expression; a plain name is the identity transform."""
        if len(text) > _TEXT_MAX:
            raise InvalidSchemaError(
                f"partition expression '{text[:80]}...' has more than {_TEXT_MAX} characters"
            )
        if "(" not in text:
            return cls(column=text.strip().strip("`"))
        match = _CALL.fullmatch(text)
        if match is None:
            raise InvalidSchemaError(
                f"'{text}' is not a partition expression: write col, day(col), bucket(16, col)"
                " or truncate(4, col)"
            )
        name = match.group(1).lower()
        name = _PLURALS.get(name, name)
        column = match.group(3).strip("`")
        if match.group(2) is not None and len(match.group(2)) > _DIGITS_MAX:
            raise InvalidSchemaError(
                f"partition expression '{text[:80]}': its number must be below 2**31"
            )
        parameter = None if match.group(2) is None else int(match.group(2))
        transforms = ["identity", *_TIME_TRANSFORMS, *_PARAMETER_TRANSFORMS]
        if name not in transforms:
            raise InvalidSchemaError(
                f"partition expression '{text}': unknown transform '{name}'"
                f"{suggestion(name, transforms)} (known: {', '.join(transforms)})"
            )
        if (parameter is not None) != (name in _PARAMETER_TRANSFORMS) or parameter == 0:
            raise InvalidSchemaError(
                f"partition expression '{text}': write bucket(16, col) or truncate(4, col) with a"
                " positive number, and the other transforms without one"
            )
        return cls(column=column, transform=name, parameter=parameter)

    def __str__(self) -> str:
        if self.transform == "identity":
            return self.column
        if self.parameter is not None:
            return f"{self.transform}({self.parameter}, {self.column})"
        return f"{self.transform}({self.column})"

    @property
    def name(self) -> str:
        """The partition field's name in Iceberg, as derived by Iceberg's libraries."""
        if self.transform == "identity":
            return self.column
        suffix = "trunc" if self.transform == "truncate" else self.transform
        return f"{self.column}_{suffix}"

    def check(self, schema: Schema, *, table: str) -> None:
        """Raise `InvalidSchemaError` unless the transform fits the column's type."""
        t = schema.column(self.column, table=table).type
        if self.transform not in type_of(t).transforms:
            raise InvalidSchemaError(
                f"table '{table}': partition field '{self}' does not fit column"
                f" '{self.column}' of type {t}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """The order of rows in a file: by `columns` in turn, or by all columns alike (z-order)."""

    columns: tuple[str, ...] = ()
    is_z_order: bool = False

    def __str__(self) -> str:
        names = ", ".join(self.columns)
        return f"zorder({names})" if self.is_z_order else names


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The partition fields and the order of the lake table for batch reads."""

    partitioned_by: tuple[PartitionField, ...]
    clustering: Clustering

    @classmethod
    def parse(
        cls, properties: Mapping[str, str], *, schema: Schema, table: str
    ) -> BatchLayout | None:
        """Read a table's properties; None without a second layout.

        Raises `InvalidSchemaError` naming property and column.
        """
        partition = properties.get(BATCH_PARTITION_PROPERTY, "").strip()
        sort = properties.get(BATCH_SORT_PROPERTY, "").strip()
        if not partition and not sort:
            return None
        fields = tuple(PartitionField.parse(text) for text in _items(partition))
        if len({field.name for field in fields}) != len(fields):
            raise InvalidSchemaError(
                f"table '{table}': property {BATCH_PARTITION_PROPERTY} has a field twice"
            )
        for field in fields:
            field.check(schema, table=table)
        clustering = _clustering(sort, table=table)
        for name in clustering.columns:
            column = schema.column(name, table=table)
            if pa.types.is_nested(column.type):
                raise InvalidSchemaError(
                    f"table '{table}': property {BATCH_SORT_PROPERTY}: column '{name}' has nested"
                    f" type {type_name(column.type)}; sort by columns of simple types"
                )
        return cls(partitioned_by=fields, clustering=clustering)

    @property
    def columns(self) -> frozenset[str]:
        """The columns whose predicates let reads of this layout skip files or parts of files."""
        return frozenset(self.clustering.columns) | {f.column for f in self.partitioned_by}

    def renamed(self, name: str, new: str) -> dict[str, str]:
        """Return the properties of the layout after a column is renamed."""
        fields = (
            replace(field, column=new) if field.column == name else field
            for field in self.partitioned_by
        )
        columns = tuple(new if column == name else column for column in self.clustering.columns)
        texts = {
            BATCH_PARTITION_PROPERTY: ", ".join(str(field) for field in fields),
            BATCH_SORT_PROPERTY: str(replace(self.clustering, columns=columns)),
        }
        return {key: text for key, text in texts.items() if text}


def _items(text: str) -> list[str]:
    return [item.strip() for item in _COMMA_OUTSIDE_CALLS.split(text)] if text else []


def _clustering(text: str, *, table: str) -> Clustering:
    where = f"table '{table}': property {BATCH_SORT_PROPERTY} = '{text}'"
    call = _Z_ORDER.fullmatch(text)
    columns = tuple(item.strip("`") for item in _items(text if call is None else call[1]))
    if len(set(columns)) != len(columns) or "" in columns:
        raise InvalidSchemaError(f"{where} must name columns, each once, with commas between them")
    if call is not None and not 2 <= len(columns) <= Z_ORDER_COLUMNS_MAX:
        raise InvalidSchemaError(
            f"{where} has {len(columns)} columns: zorder takes 2 to {Z_ORDER_COLUMNS_MAX}; write"
            " one column without it"
        )
    return Clustering(columns=columns, is_z_order=call is not None)
