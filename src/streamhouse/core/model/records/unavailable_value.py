"""Debezium's placeholder for a value unchanged by an update, in each of its forms.

PostgreSQL stores large values outside of the row, and logs them again only after a change. Debezium
then sends a placeholder, in the form of the column's type. All readers of Debezium's envelope check
for the placeholder here, so that no reader stores the placeholder as data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["UNAVAILABLE_VALUE", "UnavailableValue"]

UNAVAILABLE_VALUE: Final = "__debezium_unavailable_value"
"""Debezium's default for its setting `unavailable.value.placeholder`."""


class UnavailableValue:
    """Finds the placeholder among the values of events.

    `forms` has every form: text, bytes, an `hstore` as JSON or as an object, and arrays of texts,
    of bytes, of numbers, of numbers as texts, or of UUIDs. `texts` has the forms as JSON without
    blanks; a text form is unquoted.
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
        few = [str(number) for number in numbers[:8]]
        self._marks = (placeholder, as_bytes, as_uuid, ",".join(few), '","'.join(few))
        self._byte_marks = tuple(mark.encode() for mark in self._marks[:3])
        # Other programs than Debezium write JSON with blanks.
        self._numbers = re.compile(r'"?\s*,\s*"?'.join(few).encode())

    def may_be_in(self, events: bytes, *, has_arrays: bool = True) -> bool:
        """Return whether events may contain the placeholder; False is always right.

        Without array columns, only two of the forms are possible.
        """
        marks = self._byte_marks if has_arrays else self._byte_marks[:2]
        return any(mark in events for mark in marks) or (
            has_arrays and self._numbers.search(events) is not None
        )

    def columns_of(self, row: Mapping[str, Any], text: str | None = None) -> tuple[str, ...]:
        """Return the columns of `row` with the placeholder.

        `text` is the event's text; a search in `text` first saves the check of each value.
        """
        if text is not None and not any(mark in text for mark in self._marks):
            return ()
        return tuple(name for name, value in row.items() if value in self.forms)

    @property
    def reason(self) -> str:
        """Why a row with the placeholder is refused, and the remedy."""
        return (
            f"the update left the value alone, and Debezium sends '{self.placeholder}' instead of"
            " it; set REPLICA IDENTITY FULL for the table in PostgreSQL, and Debezium sends such"
            " values too"
        )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
