"""The second layout of a table in the lake: how it is partitioned and sorted for batch reads.

As users write it in a table's properties:

    table.datalake.batch-layout.partition    day(event_time), bucket(16, device)
    table.datalake.batch-layout.sort         event_time, device    or    zorder(lat, lon)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidSchemaError
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.schema import Schema

__all__ = [
    "BATCH_PARTITION_PROPERTY",
    "BATCH_SORT_PROPERTY",
    "BatchLayout",
    "Clustering",
]

BATCH_PARTITION_PROPERTY: Final = "table.datalake.batch-layout.partition"
BATCH_SORT_PROPERTY: Final = "table.datalake.batch-layout.sort"
Z_ORDER_COLUMNS_MAX: Final = 4
_Z_ORDER: Final = re.compile(r"\s*zorder\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_COMMA_OUTSIDE_CALLS: Final = re.compile(r",(?![^()]*\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """The order of rows in a file: by `columns`, the first one first, or by all of them alike."""

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
        """Read a table's properties; None when they ask for no second layout.

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
                    f" type {column.type}; sort by columns of simple types"
                )
        return cls(partitioned_by=fields, clustering=clustering)

    @property
    def columns(self) -> frozenset[str]:
        """The columns by which reads of this layout can leave out files or parts of them."""
        return frozenset(self.clustering.columns) | {f.column for f in self.partitioned_by}

    def renamed(self, name: str, new: str) -> dict[str, str]:
        """Return the properties of the layout after a column got a new name."""
        fields = (
            replace(field, column=new) if field.column == name else field
            for field in self.partitioned_by
        )
        columns = tuple(new if other == name else other for other in self.clustering.columns)
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
