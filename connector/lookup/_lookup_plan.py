"""The request of a lookup, checked against the table on the driver; values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
    UnsupportedError,
    listing,
    suggestion,
)
from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.units import parse_bytes

__all__ = [
    "CACHE_BYTES",
    "INNER",
    "LEFT",
    "LookupPlan",
    "check_key_types",
    "key_order",
    "looked_up",
    "planned",
    "resolved",
]

LEFT: Final = "left"
INNER: Final = "inner"
CACHE_BYTES: Final = "128MiB"
_CACHE_BYTES_MAX: Final = 1 << 30
_CACHE_MS_MAX: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupPlan:
    """The table, keys and columns of a lookup; sent to the executors.

    `frame_columns` are the DataFrame's columns that hold the key, in the key's order. `key_schema`
    has the table's columns to compare: the whole primary key, or its first columns. `columns` are
    the looked-up columns of the table, at least one. `row_schema` has the same columns with their
    names in the result; without `shows_columns` the result has no looked-up column. With
    `may_write_files`, a full read of the table is written to a file for the other tasks of the
    machine.
    """

    table: str
    endpoint: str
    token: str | None
    frame_columns: tuple[str, ...]
    key_schema: pa.Schema
    is_whole_key: bool
    columns: tuple[str, ...]
    row_schema: pa.Schema
    shows_columns: bool = True
    may_write_files: bool = False
    how: str = LEFT
    cache_ms: int = 0
    cache_bytes: int

    def __repr__(self) -> str:
        # A log may show this; the token never.
        return f"LookupPlan(table='{self.table}', endpoint={self.endpoint!r})"


def key_order(info: TableInfo, names: Sequence[str]) -> tuple[str, ...]:
    """Return the key columns among `names`, in the key's order: the whole key or a prefix."""
    table = str(info.path)
    if not info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{table}' has no primary key, so rows cannot be looked up in it; join with"
            f" spark.read.format('streamhouse').load('{table}') instead"
        )
    key = info.descriptor.primary_key
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(
                f"table '{table}': column '{name}' is compared twice; name it once"
            )
    leading = key[: len(names)]
    if not names or set(leading) != set(names):
        raise InvalidRequestError(
            f"table '{table}': rows are looked up by the primary key ({', '.join(key)}) or by its"
            f" first columns, not by ({', '.join(names)}); join with"
            f" spark.read.format('streamhouse').load('{table}') instead"
        )
    return leading


def check_key_types(info: TableInfo, fields: Mapping[str, pa.Field]) -> None:
    """Raise unless each key column can be compared with the DataFrame's field in `fields`."""
    table = str(info.path)
    for name, field in fields.items():
        try:
            part = pa.schema([pa.field(name, field.type)])
            check_schema(part, info.schema.select([name], table=table), table=table)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(
                f"{error.message}, in its column '{field.name}'; cast that"
            ) from None


def looked_up(
    info: TableInfo,
    columns: Sequence[str] | Mapping[str, str] | None,
    *,
    without: Sequence[str],
    is_case_sensitive: bool,
) -> dict[str, str]:
    """Return table column -> its name in the result; by default all columns but `without`."""
    table = str(info.path)
    if columns is None:
        return {name: name for name in info.schema.names if name not in without}
    if isinstance(columns, str):
        raise InvalidRequestError(f"columns is a list of names, as in columns=['{columns}']")
    named = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    table_columns = info.schema.names
    owner = f"table '{table}'"
    return {
        resolved(name, table_columns, owner=owner, is_case_sensitive=is_case_sensitive): str(result)
        for name, result in named.items()
    }


def resolved(name: str, names: Sequence[str], *, owner: str, is_case_sensitive: bool) -> str:
    """Return the name in `names` that `name` means, as Spark matches names."""
    matches = [each for each in names if each == name]
    if not matches and not is_case_sensitive:
        matches = [each for each in names if each.lower() == name.lower()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidRequestError(
            f"'{name}' is ambiguous: {owner} has {len(matches)} such columns; rename one"
        )
    raise UnknownColumnError(
        f"{owner} has no column '{name}'{suggestion(name, list(names))}"
        f" ({listing('columns', list(names))})"
    )


def planned(
    info: TableInfo,
    connection: tuple[str, str | None],
    key: tuple[str, ...],
    result_names: Mapping[str, str],
    *,
    frame_columns: tuple[str, ...],
    how: str,
    cache_ms: int = 0,
    cache_bytes: int | str = CACHE_BYTES,
    may_write_files: bool = False,
) -> LookupPlan:
    """Return the plan of a lookup by `key`, as `key_order` returns it.

    `connection` is the endpoint and the token, `result_names` is the result of `looked_up`, and
    `frame_columns` hold the key.
    """
    table = str(info.path)
    if not 0 <= cache_ms <= _CACHE_MS_MAX:
        raise InvalidRequestError(f"cache_ms is 0 to {_CACHE_MS_MAX} milliseconds, not {cache_ms}")
    size = parse_bytes(str(cache_bytes), name="cache_bytes")
    if not 0 < size <= _CACHE_BYTES_MAX:
        raise InvalidRequestError(f"cache_bytes is at most 1GiB, not {cache_bytes}")
    # At least one column is read, to tell a matching row from no row.
    named = result_names or {key[0]: key[0]}
    columns = info.schema.select(list(named), table=table).to_arrow()
    return LookupPlan(
        table=table,
        endpoint=connection[0],
        token=connection[1],
        frame_columns=frame_columns,
        key_schema=info.schema.select(list(key), table=table).to_arrow(),
        is_whole_key=len(key) == len(info.descriptor.primary_key),
        columns=tuple(columns.names),
        row_schema=pa.schema([field.with_name(named[field.name]) for field in columns]),
        shows_columns=bool(result_names),
        may_write_files=may_write_files,
        how=how,
        cache_ms=cache_ms,
        cache_bytes=size,
    )
