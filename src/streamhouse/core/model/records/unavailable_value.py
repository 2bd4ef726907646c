"""Debezium's placeholder for a value that an update left alone, in each form that it has.

PostgreSQL moves large values out of their row, and does not log them again when an update leaves
them alone. Debezium then sends a placeholder, written as the column's type is. All readers of
Debezium's envelope look here, so that none of them stores the placeholder as data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["UNAVAILABLE_VALUE", "UnavailableValue"]

UNAVAILABLE_VALUE: Final = "__debezium_unavailable_value"
"""Debezium's default for its setting `unavailable.value.placeholder`."""


class UnavailableValue:
    """Finds a placeholder among values as events write them.

    `forms` is every form: text, bytes, an `hstore` as JSON or as an object, an array of texts, of
    bytes, of numbers, of these as texts, or of UUIDs. `texts` is the same as JSON without blanks,
    of a text its characters.
    """

    def __init__(self, placeholder: str = UNAVAILABLE_VALUE) -> None:
        raw = placeholder.encode()
        as_bytes = base64.b64encode(raw).decode()
        numbers = list(raw)
        # As Java's `UUID.nameUUIDFromBytes`.
        as_uuid = str(uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3))
        self.placeholder = placeholder
        self.forms: tuple[Any, ...] = (
            placeholder,
            as_bytes,
            _json({placeholder: placeholder}),
            {placeholder: placeholder},
            [placeholder],
            [as_bytes],
            numbers,
            [str(number) for number in numbers],
            [as_uuid],
        )
        texts = [form if isinstance(form, str) else _json(form) for form in self.forms]
        self.texts = tuple(dict.fromkeys(texts))
        self._marks = (placeholder, as_bytes, as_uuid, ",".join(map(str, numbers[:8])))
        self._byte_marks = tuple(mark.encode() for mark in self._marks)

    def may_be_in(self, events: bytes, *, has_arrays: bool = True) -> bool:
        """Return whether events may have the placeholder; quick, and never wrong if it says no.

        Where no column is an array, only two of its forms can be there.
        """
        marks = self._byte_marks if has_arrays else self._byte_marks[:2]
        return any(mark in events for mark in marks)

    def columns_of(self, row: Mapping[str, Any], text: str | None = None) -> tuple[str, ...]:
        """Return the columns of `row` that are unavailable; `text` is the event as it was written,
        and saves a look at each of its values."""
        if text is not None and not any(mark in text for mark in self._marks):
            return ()
        return tuple(name for name, value in row.items() if value in self.forms)

    @property
    def reason(self) -> str:
        """Why a row with the placeholder in a column is refused, and what to do."""
        return (
            f"the update left the value alone, and Debezium sends '{self.placeholder}' instead of"
            " it; set REPLICA IDENTITY FULL for the table in PostgreSQL, and Debezium sends such"
            " values too"
        )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
