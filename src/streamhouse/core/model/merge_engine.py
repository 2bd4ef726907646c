"""How a primary key table merges a row into the stored row: properties as a checked value.

    table.merge-engine = last_row (default) | first_row | versioned | aggregation
    table.merge-engine.versioned.ver-column = <column>
    fields.<column>.agg = sum | min | max | last_value | last_non_null | first_value
                        | bool_and | bool_or | count | listagg
    fields.<column>.listagg.delimiter = , (default)
    table.changelog.image = full (default) | after
    table.delete.behavior = allow (default) | ignore (default of the other engines) | disallow

Creating a table refuses contradictory combinations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, UnknownOptionError, suggestion
from streamhouse.core.model.schema import Column, Schema, type_name
from streamhouse.core.model.values._property_choice import property_choice
from streamhouse.core.types.registry import type_of

__all__ = [
    "MERGE_PROPERTY_HELP",
    "Aggregate",
    "ChangelogImage",
    "ColumnAggregate",
    "DeleteBehavior",
    "MergeEngine",
    "MergeRules",
    "is_merge_property",
]

_ENGINE: Final = "table.merge-engine"
_VERSION_COLUMN: Final = "table.merge-engine.versioned.ver-column"
_IMAGE: Final = "table.changelog.image"
_DELETE: Final = "table.delete.behavior"
_AGGREGATE: Final = re.compile(r"fields\.(?P<column>.+)\.agg")
_DELIMITER: Final = re.compile(r"fields\.(?P<column>.+)\.listagg\.delimiter")

MERGE_PROPERTY_HELP: Final[dict[str, tuple[str, str]]] = {
    _ENGINE: ("last_row", "How a row is merged into the stored row with the same key."),
    _VERSION_COLUMN: ("", "Engine versioned: a row wins if this column is not smaller."),
    _IMAGE: ("full", "Changelog images: full has -U and +U, after has only +U."),
    _DELETE: ("allow", "Deletes are applied, ignored without a word, or refused."),
    "fields.<column>.agg": ("last_non_null", "Engine aggregation: how the column is merged."),
    "fields.<column>.listagg.delimiter": (",", "What listagg puts between values."),
}
"""Property key -> (default, meaning); a test compares the documentation."""


class MergeEngine(StrEnum):
    """The resulting row when a new row has the key of a stored row."""

    LAST_ROW = "last_row"
    FIRST_ROW = "first_row"
    VERSIONED = "versioned"
    AGGREGATION = "aggregation"


class ChangelogImage(StrEnum):
    """Whether an update leaves a `-U` before its `+U`."""

    FULL = "full"
    AFTER = "after"


class DeleteBehavior(StrEnum):
    """The effect of a delete."""

    ALLOW = "allow"
    IGNORE = "ignore"
    DISALLOW = "disallow"


class Aggregate(StrEnum):
    """How one column of an aggregation table is merged. Nulls are skipped except as noted.

    `last_value` and `first_value` take nulls as values. `min`, `max` and `count` follow Spark: NaN
    is greater than any number, and `count` counts values which are not null. An update without the
    column also counts.
    """

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST_VALUE = "last_value"
    LAST_NON_NULL = "last_non_null"
    FIRST_VALUE = "first_value"
    BOOL_AND = "bool_and"
    BOOL_OR = "bool_or"
    COUNT = "count"
    LISTAGG = "listagg"


_NEEDED: Final = {
    Aggregate.SUM: "a number",
    Aggregate.MIN: "a type with an order",
    Aggregate.MAX: "a type with an order",
    Aggregate.BOOL_AND: "boolean",
    Aggregate.BOOL_OR: "boolean",
    Aggregate.COUNT: "int or bigint",
    Aggregate.LISTAGG: "string",
}
"""The types that an aggregate needs: types whose `LogicalType.aggregates` has the aggregate."""
# Apache Fluss's names for the same functions.
_AGGREGATE_ALIASES: Final = {
    "last_value_ignore_nulls": Aggregate.LAST_NON_NULL,
    "string_agg": Aggregate.LISTAGG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAggregate:
    """The aggregate of one column; only `listagg` uses `delimiter`."""

    function: Aggregate
    delimiter: str = ","


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRules:
    """All rules for the effect of an upsert or delete on a row.

    `aggregates` has every column outside of the key for the aggregation engine, else none.
    `version_column` is set for the versioned engine only.
    """

    engine: MergeEngine = MergeEngine.LAST_ROW
    image: ChangelogImage = ChangelogImage.FULL
    delete_behavior: DeleteBehavior = DeleteBehavior.ALLOW
    version_column: str | None = None
    aggregates: Mapping[str, ColumnAggregate] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        properties: Mapping[str, str],
        *,
        schema: Schema,
        primary_key: Sequence[str],
        table: str,
    ) -> MergeRules:
        """Read the merge properties among `properties`; other properties are ignored."""
        settings = {key: text for key, text in properties.items() if is_merge_property(key)}
        if settings and not primary_key:
            raise InvalidSchemaError(
                f"table '{table}': property {next(iter(settings))} needs a primary key, and the"
                " table has none"
            )
        engine = property_choice(MergeEngine, settings, _ENGINE, MergeEngine.LAST_ROW, table=table)
        return cls(
            engine=engine,
            image=property_choice(
                ChangelogImage, settings, _IMAGE, ChangelogImage.FULL, table=table
            ),
            delete_behavior=_delete_behavior(settings, engine, table=table),
            version_column=_version_column(settings, engine, schema, primary_key, table=table),
            aggregates=_aggregates(settings, engine, schema, primary_key, table=table),
        )


def is_merge_property(key: str) -> bool:
    """Whether `key` is a property of `MergeRules`."""
    return (
        key in (_ENGINE, _VERSION_COLUMN, _IMAGE, _DELETE)
        or _AGGREGATE.fullmatch(key) is not None
        or _DELIMITER.fullmatch(key) is not None
    )


def _delete_behavior(
    settings: Mapping[str, str], engine: MergeEngine, *, table: str
) -> DeleteBehavior:
    default = DeleteBehavior.ALLOW if engine is MergeEngine.LAST_ROW else DeleteBehavior.IGNORE
    behavior = property_choice(DeleteBehavior, settings, _DELETE, default, table=table)
    if behavior is DeleteBehavior.ALLOW and engine in (
        MergeEngine.FIRST_ROW,
        MergeEngine.VERSIONED,
    ):
        raise InvalidSchemaError(
            f"table '{table}': {_DELETE} = allow does not go with {_ENGINE} = {engine}: a deleted"
            " row could come back with an older row; use ignore or disallow"
        )
    return behavior


def _version_column(
    settings: Mapping[str, str],
    engine: MergeEngine,
    schema: Schema,
    primary_key: Sequence[str],
    *,
    table: str,
) -> str | None:
    name = settings.get(_VERSION_COLUMN)
    if engine is not MergeEngine.VERSIONED:
        if name is not None:
            raise InvalidSchemaError(
                f"table '{table}': {_VERSION_COLUMN} needs {_ENGINE} = versioned"
            )
        return None
    if name is None:
        raise InvalidSchemaError(
            f"table '{table}': {_ENGINE} = versioned needs {_VERSION_COLUMN}, the column whose"
            " greater value wins"
        )
    column = schema.column(name, table=table)
    if name in primary_key:
        raise InvalidSchemaError(
            f"table '{table}': version column '{name}' is part of the primary key, so it never"
            " changes"
        )
    t = column.type
    if not (pa.types.is_integer(t) or pa.types.is_timestamp(t) or pa.types.is_date(t)):
        raise InvalidSchemaError(
            f"table '{table}': version column '{name}' is {t}; use an integer, a date or a"
            " timestamp"
        )
    return name


def _aggregates(
    settings: Mapping[str, str],
    engine: MergeEngine,
    schema: Schema,
    primary_key: Sequence[str],
    *,
    table: str,
) -> dict[str, ColumnAggregate]:
    functions = _by_column(settings, _AGGREGATE)
    delimiters = _by_column(settings, _DELIMITER)
    for name, (key, _) in (functions | delimiters).items():
        schema.column(name, table=table)
        if engine is not MergeEngine.AGGREGATION:
            raise InvalidSchemaError(
                f"table '{table}': property {key} needs {_ENGINE} = aggregation"
            )
        if name in primary_key:
            raise InvalidSchemaError(
                f"table '{table}': property {key}: '{name}' is part of the primary key and cannot"
                " be aggregated"
            )
    if engine is not MergeEngine.AGGREGATION:
        return {}
    aggregates = {}
    for column in schema.columns:
        if column.name in primary_key:
            continue
        function = _function(column, functions.get(column.name), table=table)
        delimiter = ","
        if column.name in delimiters:
            key, delimiter = delimiters[column.name]
            if function is not Aggregate.LISTAGG:
                raise InvalidSchemaError(
                    f"table '{table}': property {key} needs fields.{column.name}.agg = listagg"
                )
        aggregates[column.name] = ColumnAggregate(function=function, delimiter=delimiter)
    return aggregates


def _by_column(settings: Mapping[str, str], pattern: re.Pattern[str]) -> dict[str, tuple[str, str]]:
    entries = {}
    for key, text in settings.items():
        match = pattern.fullmatch(key)
        if match is not None:
            entries[match.group("column")] = (key, text)
    return entries


def _function(column: Column, entry: tuple[str, str] | None, *, table: str) -> Aggregate:
    if entry is None:
        return Aggregate.LAST_NON_NULL
    key, text = entry
    name = text.strip().lower()
    names = [function.value for function in Aggregate]
    if name not in names and name not in _AGGREGATE_ALIASES:
        raise UnknownOptionError(
            f"table '{table}': property {key} = '{text}' is not one of {', '.join(names)}"
            f"{suggestion(name, names)}"
        )
    function = _AGGREGATE_ALIASES.get(name) or Aggregate(name)
    needed = _NEEDED.get(function)
    if needed is not None and function not in type_of(column.type).aggregates:
        raise InvalidSchemaError(
            f"table '{table}': property {key}: {function} of column '{column.name}' needs"
            f" {needed}, not {type_name(column.type)}"
        )
    return function
