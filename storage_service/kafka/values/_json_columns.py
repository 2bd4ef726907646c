"""Texts of JSON objects, for values or keys, as columns of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.schema import empty_batch
from streamhouse.core.rows.checked_rows import ReadRows
from streamhouse.core.text.json_objects import RowReader, joined_runs, texts_of
from streamhouse.storage_service.kafka.values._draft import DraftBounds, spread_out

__all__ = ["json_columns", "json_keys"]

# A number, word or text, which an object can contain without changing the meaning.
_SCALAR: Final = r'^[ \t\r\n]*(?:"(?:[^"\\]|\\.)*"|[^ \t\r\n",:\[\]{}]+)[ \t\r\n]*$'


def json_columns(
    values: pa.BinaryArray,
    types: Mapping[str, pa.DataType],
    bounds: DraftBounds,
    *,
    owner: str,
    record_part: str,
) -> ReadRows:
    """Return objects as rows of columns `types`; a null is a row of nulls.

    Args:
        owner: the owner of the columns in errors.
        record_part: the part of the record in errors.
    """

    def read(texts: pa.BinaryArray) -> ReadRows:
        if not len(texts):
            return ReadRows(empty_batch(pa.schema(list(types.items()))), {})
        reader = RowReader(
            texts_of(texts),
            types,
            check=bounds.check_bytes,
            unreadable=lambda _, reason: f"the {record_part} {reason}",
            what=bounds.what,
            owner=owner,
        )
        return joined_runs(reader.runs())

    bounds.check(types, len(values))
    return spread_out(values, read)


def json_keys(
    keys: pa.BinaryArray, types: Mapping[str, pa.DataType], bounds: DraftBounds
) -> ReadRows:
    """Return keys as columns `types`: objects, or plain values for a single column."""
    owner, record_part = f"the key ({', '.join(types)})", "key"
    if len(types) != 1:
        return json_columns(keys, types, bounds, owner=owner, record_part=record_part)
    ((name, t),) = types.items()
    is_scalar = pc.match_substring_regex(keys, _SCALAR)
    if not pc.any(is_scalar).as_py():
        return json_columns(keys, types, bounds, owner=owner, record_part=record_part)
    # `5` is read as `{"id": 5}`, by the same reader.
    head = _json_name(name)
    wrapped = pc.binary_join_element_wise(head, keys, pa.scalar(b"}"), pa.scalar(b""))
    return json_columns(
        pc.if_else(is_scalar, wrapped, keys),
        {name: t},
        bounds,
        owner=owner,
        record_part=record_part,
    )


def _json_name(name: str) -> pa.Scalar:
    return pa.scalar(b"{" + json.dumps(name).encode() + b":", pa.binary())
