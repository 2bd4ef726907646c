"""What goes wrong with one of many partitions without being an error of ours: said of it alone.

A library's own exception, or a bug, that ended a request would end every request of its client,
which asks for the same partitions again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Final

from streamhouse.core.errors import InternalError, StreamhouseError

__all__ = ["failure_of"]

_logger = logging.getLogger(__name__)

_TOLD_MAX: Final = 1_000
_told: Final[OrderedDict[str, None]] = OrderedDict()
_lock: Final = threading.Lock()


def failure_of(error: Exception, doing: str) -> StreamhouseError:
    """Return what is answered where `doing` met an error. Any thread.

    One that is none of ours is logged with its traceback, once: clients ask again and again.
    """
    if isinstance(error, StreamhouseError):
        return error
    if _is_news(f"{doing} {type(error).__name__}"):
        _logger.error("event=bug doing=%r", doing, exc_info=error)
    return InternalError(f"{doing} failed with {type(error).__name__}; the service's log says why")


def _is_news(what: str) -> bool:
    with _lock:
        is_news = what not in _told
        _told[what] = None
        _told.move_to_end(what)
        if len(_told) > _TOLD_MAX:
            _told.popitem(last=False)
    return is_news
