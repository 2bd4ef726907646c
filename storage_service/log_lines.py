"""How the service logs: one line an event on stderr, `key=value`, never a token or a row.

Every line that is written while a request is answered, on whatever thread, has its request id.
"""

from __future__ import annotations

import datetime
import logging
import sys
from contextvars import ContextVar
from typing import Final

__all__ = ["REQUEST_ID", "configure_logging"]

REQUEST_ID: Final = ContextVar("request_id", default="")
"""The id of the request that is being answered, empty outside of one."""

# uvicorn reports what we answer and log ourselves; only its own failures are news.
_QUIET: Final = {"uvicorn.error": logging.CRITICAL, "asyncio": logging.WARNING}


class KeyValueFormatter(logging.Formatter):
    """`time=... level=... logger=... event=...`; a trace follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, plus its trace if it has one."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        message = record.getMessage().replace("\n", "\\n")
        if not message.startswith("event="):
            message = f"message={message!r}"
        request_id = REQUEST_ID.get()
        if request_id and " request_id=" not in message:
            message += f" request_id={request_id}"
        line = (
            f"time={when.isoformat(timespec='milliseconds')} level={record.levelname.lower()}"
            f" logger={record.name} {message}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(level: str) -> None:
    """Send all logging of this process to stderr from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, quiet in _QUIET.items():
        logging.getLogger(name).setLevel(quiet)
