"""The immediate end of a process that lost its shard or its disk, from any thread.

Nothing is closed and no request is answered: requests in flight are no longer this process's.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final, NoReturn

__all__ = ["FENCED_EXIT_CODE", "JOURNAL_FAILED_EXIT_CODE", "NOT_STORED_EXIT_CODE", "end_at_once"]

_logger = logging.getLogger(__name__)

NOT_STORED_EXIT_CODE: Final = 1
"""Stopped, but the store was away: the journal has neither everything nor a seal."""
FENCED_EXIT_CODE: Final = 3
"""Another process owns the shard."""
JOURNAL_FAILED_EXIT_CODE: Final = 4
"""The disk refused a change stored in the journal; the next start repeats the change."""


def end_at_once(event: str, why: str, *, exit_code: int) -> NoReturn:
    """Log the reason in one line, and end the process."""
    try:
        _logger.critical("event=%s why=%r exit_code=%d", event, why, exit_code)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(exit_code)
