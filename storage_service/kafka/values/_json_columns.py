"""Texts of JSON objects, a value or a key each, as columns of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.schema import empty_batch
from streamhouse.core.text.json_texts import JsonTexts, RowReader
from streamhouse.storage_service.kafka.values._draft import Bad, DraftBounds, spread_out

__all__ = ["json_columns", "json_keys", "texts_of"]

# Of more of them Arrow makes one text in less time.
_FEW_VALUES: Final = 1_000
# One number, word or text: what may be wrapped into an object, and stay one value.
_SCALAR: Final = r'^[ \t\r\n]*(?:"(?:[^"\\]|\\.)*"|[^ \t\r\n",:\[\]{}]+)[ \t\r\n]*$'


def texts_of(values: pa.BinaryArray) -> JsonTexts:
    """Return values, none of which is null, as texts with a newline between two of them."""
    count = len(values)
    bounds = np.frombuffer(values.buffers()[1], np.int32, count + 1, 4 * values.offset)
    lengths = np.diff(bounds).astype(np.int64)
    if count <= _FEW_VALUES:
        body: bytes | pa.Buffer = b"\n".join(values.to_pylist())
    else:
        whole = pa.LargeListArray.from_arrays(pa.array([0, count], pa.int64()), values)
        body = pc.binary_join(whole, pa.scalar(b"\n", pa.binary()))[0].as_buffer()
    ends = np.cumsum(lengths + 1) - 1
    return JsonTexts(body, ends - lengths, ends)


def json_columns(
    values: pa.BinaryArray,
    types: Mapping[str, pa.DataType],
    bounds: DraftBounds,
    *,
    whose: str,
    what_each: str,
) -> tuple[pa.RecordBatch, Bad]:
    """Return objects as rows of columns `types`; a null is a row of nulls.

    Args:
        whose: whose columns they are, as errors say it.
        what_each: what an object is of its record, as errors say it.
    """

    def read(texts: pa.BinaryArray) -> tuple[pa.RecordBatch, Bad]:
        if not len(texts):
            return empty_batch(pa.schema(list(types.items()))), {}
        bad: Bad = {}
        runs = []
        reader = RowReader(
            texts_of(texts),
            types,
            check=bounds.check_bytes,
            unreadable=lambda _, reason: f"the {what_each} {reason}",
            what=bounds.what,
            whose=whose,
        )
        for first, _, run in reader.runs():
            runs.append(run.rows)
            bad |= {first + at: why for at, why in run.bad.items()}
        return (runs[0] if len(runs) == 1 else pa.concat_batches(runs)), bad

    bounds.check(types, len(values))
    return spread_out(values, read)


def json_keys(
    keys: pa.BinaryArray, types: Mapping[str, pa.DataType], bounds: DraftBounds
) -> tuple[pa.RecordBatch, Bad]:
    """Return keys as columns `types`: objects, or values alone where there is one column."""
    whose, what_each = f"the key ({', '.join(types)})", "key"
    if len(types) != 1:
        return json_columns(keys, types, bounds, whose=whose, what_each=what_each)
    ((name, t),) = types.items()
    is_scalar = pc.match_substring_regex(keys, _SCALAR)
    if not pc.any(is_scalar).as_py():
        return json_columns(keys, types, bounds, whose=whose, what_each=what_each)
    # `5` is read as `{"id": 5}` is, by the same reader.
    head = _json_name(name)
    wrapped = pc.binary_join_element_wise(head, keys, pa.scalar(b"}"), pa.scalar(b""))
    return json_columns(
        pc.if_else(is_scalar, wrapped, keys), {name: t}, bounds, whose=whose, what_each=what_each
    )


def _json_name(name: str) -> pa.Scalar:
    return pa.scalar(b"{" + json.dumps(name).encode() + b":", pa.binary())
