"""The first place of a text that is not UTF-8, for refusals."""

from __future__ import annotations

from typing import Final

__all__ = ["NOT_UTF8", "line_outside_utf8"]

NOT_UTF8: Final = "is not UTF-8; convert the text to UTF-8, as 'iconv -f latin1 -t utf-8' does"
"""The predicate of a refusal."""


def line_outside_utf8(body: bytes) -> int:
    """Return the line of a body's first bytes that are not UTF-8, or 0."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return body.count(10, 0, error.start) + 1
    return 0
