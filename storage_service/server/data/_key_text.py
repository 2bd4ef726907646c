"""Lookups as text: keys and rows as JSON or NDJSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
)
from streamhouse.core.model.schema import FOUND_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.division import read_rows
from streamhouse.core.text.json_reading import read_json
from streamhouse.core.text.ndjson_rows import json_object_lines
from streamhouse.core.text.rows_as_json import joined, row_texts
from streamhouse.storage_service.server.data._log_text import LogForm
from streamhouse.storage_service.server.http.http_exchange import Body

__all__ = ["TEXT_BODIES", "key_rows", "looked_up_text", "text_form"]

# Text keys are read one by one, which takes long.
KEYS_MAX: Final = 65_536
TEXT_BODIES: Final = {form.content_type: form for form in (Body.JSON, Body.NDJSON)}


def text_form(content_type: bytes) -> Body | None:
    """Return the text format of a body of keys; None for an unknown content type."""
    return TEXT_BODIES.get(content_type.partition(b";")[0].strip().lower())


def key_rows(body: bytes, form: Body, table: TableInfo, what: str) -> pa.RecordBatch:
    """Read keys or key prefixes; all keys must have the columns of the first key."""
    if form is Body.NDJSON:
        keys: Sequence[Mapping[str, Any]] = json_object_lines(body, what=what, rows_max=KEYS_MAX)
    else:
        keys = _listed(body, what)
    primary_key = table.descriptor.primary_key
    names = [name for name in primary_key if keys and name in keys[0]] or list(primary_key)
    for at, key in enumerate(keys):
        if key.keys() != set(names):
            raise SchemaMismatchError(
                f"{what}: key {at} has the columns {', '.join(key)[:200]}; keys have"
                f" {', '.join(names)}"
            )
    types = {name: table.schema.column(name, table=str(table.path)).type for name in names}
    read = read_rows(types, keys)
    for at, misfit in read.misfits.items():
        raise SchemaMismatchError(f"{what}: key {at}, column '{misfit.column}': {misfit.reason}")
    return read.rows


def _listed(body: bytes, what: str) -> Sequence[Mapping[str, Any]]:
    try:
        keys = read_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"{what}: the body {error}") from error
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise InvalidRequestError(
            f"{what}: the body must be a JSON list of keys, each an object of column to value"
        )
    if len(keys) > KEYS_MAX:
        raise RequestTooLargeError(f"{what}: {len(keys)} keys in one request; at most {KEYS_MAX}")
    return keys


def looked_up_text(
    rows: pa.RecordBatch, more: Sequence[int], form: LogForm
) -> Sequence[bytes | memoryview]:
    """Return rows as text, `null` for a key without a row."""
    position = rows.schema.get_field_index(FOUND_COLUMN)
    if position < 0:
        texts = row_texts(rows)
    else:
        texts = pc.if_else(rows.column(position), row_texts(rows.remove_column(position)), "null")
    if form is LogForm.NDJSON:
        return [memoryview(joined(texts, separator="\n")), b"\n"] if len(texts) else [b""]
    end = f'], "more": {json.dumps(list(more))}}}' if more else "]}"
    return [b'{"rows": [', memoryview(joined(texts, separator=", ")), end.encode()]
