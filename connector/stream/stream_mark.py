"""Telling the source that a read is a stream.

Spark asks a Python source for its columns before it says, anywhere, whether the read is a stream;
but the stream of a primary key table has one column more than its rows: `__change_type`. So
`readStream` marks its loads of our format by an option. Where it could not (a stream made by
another language, or by the name of an attached table), the stream says `readChangeFeed`.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from streamhouse.connector.options.options import STREAM_MARK

__all__ = ["mark_streams"]

_FORMAT: Final = "streamhouse"
_MARKED: Final = "_marks_streamhouse_streams"


def mark_streams(reader_class: Any) -> None:
    """Let `reader_class`, Spark's `DataStreamReader`, mark its loads; again changes nothing."""
    if getattr(reader_class, _MARKED, False):
        return
    choose, load = reader_class.format, reader_class.load

    @functools.wraps(choose)
    def marked_format(self: Any, source: str) -> Any:
        _mark(self, source)
        return choose(self, source)

    @functools.wraps(load)
    def marked_load(self: Any, *arguments: Any, **options: Any) -> Any:
        _mark(self, arguments[1] if len(arguments) > 1 else options.get("format"))
        return load(self, *arguments, **options)

    reader_class.format, reader_class.load = marked_format, marked_load
    setattr(reader_class, _MARKED, True)


def _mark(reader: Any, source: Any) -> None:
    if isinstance(source, str) and source.lower() == _FORMAT:
        reader.option(STREAM_MARK, "true")
