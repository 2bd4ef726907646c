"""NDJSON, one JSON object per line, as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError, RequestTooLargeError
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.core.rows.row_splitter import RowSplitter
from streamhouse.core.text.json_objects import JsonTexts, RowReader
from streamhouse.core.text.json_reading import json_object
from streamhouse.core.text.text_rows import TextBounds, TextRows

__all__ = ["divide_ndjson", "json_object_lines", "ndjson_line"]

_LINES_MAX: Final = 4_000_000
_BLANK: Final = re.compile(rb"[ \t\r]*")
_MARK: Final = b"\xef\xbb\xbf"


def divide_ndjson(body: bytes, table: TableInfo, bounds: TextBounds) -> CheckedRows:
    """Read a body and divide its rows; raises for a line without a JSON object. Thread-safe."""
    lines = _Lines(body, what=bounds.what, lines_before=bounds.lines_before)
    result = TextRows(bounds)
    types = {column.name: column.type for column in table.schema.columns}
    if table.is_primary_key_table and f'"{CHANGE_TYPE_COLUMN}"'.encode() in body:
        types[CHANGE_TYPE_COLUMN] = pa.string()
    reader = RowReader(
        lines.texts,
        types,
        check=result.check,
        unreadable=lines.refuse,
        what=bounds.what,
        owner=bounds.owner,
        defaults={CHANGE_TYPE_COLUMN: "+U"},
    )
    splitter = RowSplitter(table)
    for _, _, run in reader.runs():
        result.add(splitter.check(run), lines.number)
    return result.checked(table)


def json_object_lines(body: bytes, *, what: str, rows_max: int) -> list[Mapping[str, Any]]:
    """Return the objects of a small body; raises for a line which is not an object."""
    lines = _Lines(body, what=what)
    if len(lines) > rows_max:
        raise RequestTooLargeError(f"{what}: {len(lines)} rows in one request; at most {rows_max}")
    return [lines.object(at) for at in range(len(lines))]


def ndjson_line(body: bytes, row: int) -> int:
    """Return the line of a body with a row."""
    return _Lines(body, what="").number(row)


class _Lines:
    """The lines of a body without blank lines."""

    def __init__(self, body: bytes, *, what: str, lines_before: int = 0) -> None:
        if body.count(b"\n") > _LINES_MAX:
            raise RequestTooLargeError(f"{what}: more than {_LINES_MAX} lines; send fewer")
        self._what = what
        data = np.frombuffer(body, np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        if body and not body.endswith(b"\n"):
            ends = np.append(ends, len(body))
        starts = np.append(np.zeros(min(len(ends), 1), ends.dtype), ends[:-1] + 1)
        if len(starts) and body.startswith(_MARK):
            starts[0] = len(_MARK)
        # Only a line whose first byte is a blank or a control byte may be blank.
        is_text = np.ones(len(starts), np.bool_)
        for at in np.flatnonzero(data[np.minimum(starts, len(body) - 1)] <= ord(" ")):
            is_text[at] = _BLANK.fullmatch(body, int(starts[at]), int(ends[at])) is None
        self._numbers = np.flatnonzero(is_text) + lines_before
        self.texts = JsonTexts(body, starts[is_text], ends[is_text])

    def __len__(self) -> int:
        return len(self.texts)

    def number(self, at: int) -> int:
        """Return the number of a line, from 1 on, blank lines included."""
        return int(self._numbers[at]) + 1

    def object(self, at: int) -> Mapping[str, Any]:
        """Return the object of a line; raises for a line which is not an object."""
        try:
            return json_object(self.texts.text(at))
        except ValueError as error:
            self.refuse(at, str(error))

    def refuse(self, at: int, reason: str, /) -> NoReturn:
        """Raise for a line which is not an object; the whole body is refused."""
        raise InvalidRequestError(
            f"{self._what}: line {self.number(at)} {reason}; nothing was written"
        )
