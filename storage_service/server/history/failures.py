"""Exceptions of libraries, and bugs, as errors of a single partition of a request.

A client repeats a failed request with the same partitions. If the exception of a single partition
failed the whole request, all requests of the client would fail.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Final

from streamhouse.core.errors import InternalError, StreamhouseError

__all__ = ["failure_of"]

_logger = logging.getLogger(__name__)

_LOGGED_MAX: Final = 1_000
_logged: Final[OrderedDict[str, None]] = OrderedDict()
_lock: Final = threading.Lock()


def failure_of(error: Exception, doing: str) -> StreamhouseError:
    """Return the error to answer after `doing` failed. Any thread.

    An exception other than a `StreamhouseError` is logged with its traceback once, because clients
    repeat their requests.
    """
    if isinstance(error, StreamhouseError):
        return error
    if _is_news(f"{doing} {type(error).__name__}"):
        _logger.error("event=bug doing=%r", doing, exc_info=error)
    return InternalError(f"{doing} failed with {type(error).__name__}; the service's log says why")


def _is_news(key: str) -> bool:
    with _lock:
        is_news = key not in _logged
        _logged[key] = None
        _logged.move_to_end(key)
        if len(_logged) > _LOGGED_MAX:
            _logged.popitem(last=False)
    return is_news
