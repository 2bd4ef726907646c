"""Lookup keys, checked and encoded, and the answers of lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
)
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.casts.conform import conform
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = [
    "FIRST_STEP_ROWS",
    "FoundRows",
    "FoundValues",
    "check_key_names",
    "check_prefix",
    "check_prefix_columns",
    "least_row_bytes",
    "prefix_end",
    "read_in_steps",
    "rows_in_key_order",
    "too_many_bytes",
]

FIRST_STEP_ROWS: Final = 16
"""The rows of the first step; later steps follow the size of earlier rows."""

_STEP_GROWTH: Final = 8
_LISTED_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """The answer to a lookup of many keys.

    `rows` has the existing rows, in the order of the keys; `found` has one flag a key. After
    waiting for a high watermark of at least `end_offset` all rows of the answer can be fetched,
    too.
    """

    rows: pa.RecordBatch
    found: npt.NDArray[np.bool_]
    end_offset: int


class FoundValues(NamedTuple):
    """The stored row of each key, None or null without a row; see `FoundRows`."""

    values: Any
    end_offset: int


def check_key_names(names: Sequence[str], rules: TableRules) -> None:
    """Raise unless `names` are exactly the key columns, in any order."""
    _check_names(names, rules.primary_key, rules, purpose="a lookup")


def check_prefix_columns(names: Sequence[str], rules: TableRules) -> Sequence[str]:
    """Return the leading key columns named by `names`, in the order of the key."""
    leading = rules.primary_key[: len(names)]
    _check_names(names, leading, rules, purpose="a prefix lookup")
    if not leading:
        raise InvalidRequestError(
            f"table '{rules.table}': a prefix lookup needs leading key columns"
            f" ({', '.join(rules.primary_key)}), and there is none"
        )
    return leading


def check_prefix(prefix: pa.RecordBatch, rules: TableRules) -> bytes:
    """Return the encoded prefix of one row of leading key columns."""
    leading = check_prefix_columns(prefix.schema.names, rules)
    if prefix.num_rows != 1:
        raise InvalidRequestError(
            f"table '{rules.table}': a prefix lookup needs one row of leading key columns, not"
            f" {prefix.num_rows} rows of {len(leading)} columns"
        )
    part = rules.schema.select(leading, table=rules.table)
    conformed = conform(prefix, part, table=rules.table, key=part.names)
    encoded: bytes = encode_key(conformed.columns)[0].as_py()
    return encoded


def least_row_bytes(schema: pa.Schema) -> int:
    """Return the least memory of a row, even of nulls."""
    return sum(_least_bytes(field.type) for field in schema)


def _least_bytes(t: pa.DataType) -> int:
    if pa.types.is_struct(t):
        return sum(_least_bytes(field.type) for field in t)
    if pa.types.is_primitive(t) or pa.types.is_decimal(t):
        return max(int(t.bit_width) // 8, 1)
    return 4


def too_many_bytes(table: str, bytes_max: int) -> RequestTooLargeError:
    """Return the error for rows above the memory limit of one answer."""
    return RequestTooLargeError(
        f"lookup in '{table}': the rows have more than {bytes_max} bytes, the most that one answer"
        " may have of the memory for answers (answers_bytes_max); ask for fewer rows at once"
    )


def read_in_steps(
    keys: pa.Array, read: Callable[[pa.Array], pa.Array], *, row_bytes: int, bytes_max: int
) -> pa.Array | None:
    """Return the result of `read` for all keys; None above `bytes_max`.

    A row counts as `row_bytes` at least. The size of rows in files is known only after reading.
    """
    parts: list[pa.Array] = []
    start, step, size = 0, FIRST_STEP_ROWS, 0
    while start < len(keys):
        part = keys.slice(start, step)
        values = read(part)
        of_part = max(values.nbytes, row_bytes * (len(part) - values.null_count))
        size += of_part
        if size > bytes_max:
            return None
        parts.append(values)
        start += len(part)
        fitting = (bytes_max - size) * len(part) // max(of_part, 1)
        step = max(min(step * _STEP_GROWTH, fitting), FIRST_STEP_ROWS)
    return pa.concat_arrays(parts)


def prefix_end(prefix: bytes) -> bytes:
    """Return the least bytes above all bytes starting with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    assert stem, "a key starts with 01"
    return stem[:-1] + bytes([stem[-1] + 1])


def rows_in_key_order(
    newer: Mapping[bytes, bytes | None],
    older: Iterable[tuple[pa.Array, pa.Array]],
    *,
    rows_max: int,
    bytes_max: int,
    table: str,
) -> list[bytes]:
    """Return the first `rows_max + 1` rows of both; `newer` wins, and None means deleted.

    `older` are chunks of keys and rows in key order, read only as far as needed. Raises
    `RequestTooLargeError` above `bytes_max`.
    """
    newer_rows = {key: value for key, value in newer.items() if value is not None}
    row_count = size = 0
    for keys, values in older:
        size += values.nbytes
        if size > bytes_max:
            raise too_many_bytes(table, bytes_max)
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            if key not in newer:
                newer_rows[key] = value
                row_count += 1
        if row_count > rows_max:
            break
    return [newer_rows[key] for key in sorted(newer_rows)][: rows_max + 1]


def _check_names(
    names: Sequence[str], key_names: Sequence[str], rules: TableRules, *, purpose: str
) -> None:
    for name in names:
        rules.schema.column(name, table=rules.table)
    if sorted(names) != sorted(key_names):
        raise SchemaMismatchError(
            f"table '{rules.table}': {purpose} takes the key columns"
            f" ({', '.join(rules.primary_key)}), in that order from the first,"
            f" not ({', '.join(names)[:_LISTED_CHARACTERS_MAX]})"
        )
