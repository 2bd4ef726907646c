"""The log of our processes: one line per event on stderr, as `key=value` or as JSON.

Our messages are templates of fields, `"event=retention table=%s segments=%d"`. The JSON form uses
the fields' names and types directly, without parsing the text. No line contains a token or a row.
Every line written during a request, on any thread, has the request id.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import re
import sys
from contextvars import ContextVar
from typing import Final

__all__ = [
    "LOG_FORMATS",
    "REQUEST_ID",
    "RESERVED_FIELDS",
    "JsonFormatter",
    "KeyValueFormatter",
    "configure_logging",
    "template_fields",
]

REQUEST_ID: Final = ContextVar("request_id", default="")
"""The id of the current request, empty outside of a request."""
LOG_FORMATS: Final = ("text", "json")
RESERVED_FIELDS: Final = ("time", "level", "logger", "trace")
"""The fields of every line; a message may not use these names."""

# We log our responses, so only failures inside uvicorn are news. OpenTelemetry shows malformed
# headers of callers, which may be any text and are for the callers to mend.
_QUIET: Final = {
    "uvicorn.error": logging.CRITICAL,
    "asyncio": logging.WARNING,
    "opentelemetry.trace": logging.ERROR,
}
# A value is quoted or without spaces.
_FIELD: Final = re.compile(r"([a-z][a-z0-9_]*)=('[^']*'|[^\s']+)(?:\s+|$)")
_PLACEHOLDER: Final = re.compile(r"%[-#0 +]*[0-9]*(?:\.[0-9]+)?([a-zA-Z])")
_Plain = bool | int | float | str | None


class KeyValueFormatter(logging.Formatter):
    """`time=... level=... logger=... event=...`; a trace follows on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, plus the trace of an exception."""
        message = record.getMessage().replace("\n", "\\n")
        if not message.startswith("event="):
            message = f"message={message!r}"
        request_id = REQUEST_ID.get()
        if request_id and " request_id=" not in message:
            message += f" request_id={request_id}"
        line = (
            f"time={_time(record)} level={record.levelname.lower()} logger={record.name} {message}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, then the message's fields, or `message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line; the trace of an exception is the field `trace`."""
        line: dict[str, _Plain] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_fields(record),
        }
        request_id = REQUEST_ID.get()
        if request_id:
            line.setdefault("request_id", request_id)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: str, log_format: str = "text") -> None:
    """Send all logging of this process to stderr from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else KeyValueFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, quiet in _QUIET.items():
        logging.getLogger(name).setLevel(quiet)


@functools.lru_cache(1_024)
def template_fields(template: str) -> tuple[tuple[str, str], ...] | None:
    """Return the fields of one of our messages, each with its template; None for other messages."""
    fields: list[tuple[str, str]] = []
    position = 0
    while position < len(template):
        match = _FIELD.match(template, position)
        if match is None:
            return None
        fields.append((match[1], match[2]))
        position = match.end()
    return tuple(fields) if fields and fields[0][0] == "event" else None


def _fields(record: logging.LogRecord) -> dict[str, _Plain]:
    fields = template_fields(record.msg) if isinstance(record.msg, str) else None
    arguments = record.args if isinstance(record.args, tuple) else ()
    if fields is None or (record.args and not arguments):
        return {"message": record.getMessage()}
    values: dict[str, _Plain] = {}
    for name, template in fields:
        kinds = _PLACEHOLDER.findall(template.replace("%%", ""))
        field_arguments, arguments = arguments[: len(kinds)], arguments[len(kinds) :]
        values[name] = _value(template.strip("'"), kinds, field_arguments)
    return values


def _value(template: str, kinds: list[str], arguments: tuple[object, ...]) -> _Plain:
    """Return one field: a lone argument with its type, else text."""
    is_alone = len(kinds) == 1 and _PLACEHOLDER.fullmatch(template) is not None
    if not is_alone:
        return template % arguments if arguments else template.replace("%%", "%")
    [argument] = arguments
    if kinds[0] in "fge":
        # The same number of digits as in the text form.
        return float(template % argument)
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    return str(argument)


def _time(record: logging.LogRecord) -> str:
    when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return when.isoformat(timespec="milliseconds")
