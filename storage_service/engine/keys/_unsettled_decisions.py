"""The decided transactions of a followed directory that have no outcome yet.

The rows of such a transaction may be in some buckets only, so the ends of its table stay.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.directory.data_directory import DECISION_SUFFIX, DataDirectory

__all__ = ["UnsettledDecisions"]

_logger = logging.getLogger(__name__)

# A decision that is folded into `outcomes` is gone.
_DECISION_FILE: Final = re.compile(
    rf"tables/(\d+)/transactions/(?:([^/]+{DECISION_SUFFIX})|outcomes)"
)


class UnsettledDecisions:
    """See the module. One thread at a time."""

    def __init__(
        self, directory: DataDirectory, is_committing: Callable[[DataDirectory, int, str], bool]
    ) -> None:
        """`is_committing` tells whether a decision, by table and file name, has no outcome yet."""
        self._directory = directory
        self._is_committing = is_committing
        # Table -> the files of decisions that had no outcome when last read.
        self._names: dict[int, set[str]] = {}

    def note(self, changed: Iterable[str]) -> set[int]:
        """Note the decisions among changed files; return the tables of decisions and outcomes."""
        touched = set()
        for path in changed:
            match = _DECISION_FILE.fullmatch(path)
            if match is not None:
                touched.add(int(match[1]))
                if match[2] is not None and int(match[1]) in self._names:
                    self._names[int(match[1])].add(match[2])
        return touched

    def are_in(self, table_id: int) -> bool:
        """Whether a decision of the table has no outcome; an unreadable decision has none."""
        names = self._names.get(table_id)
        if names is None:
            listed = self._directory.filesystem.list_names(self._directory.transactions(table_id))
            names = {name for name in listed if name.endswith(DECISION_SUFFIX)}
        self._names[table_id] = {name for name in names if self._is_unsettled(table_id, name)}
        return bool(self._names[table_id])

    def forget(self, table_id: int) -> None:
        """Forget a table whose directory is moved or removed."""
        self._names.pop(table_id, None)

    def _is_unsettled(self, table_id: int, name: str) -> bool:
        try:
            return self._is_committing(self._directory, table_id, name)
        except StreamhouseError as error:
            _logger.warning("event=decision_unreadable table_id=%d why=%r", table_id, error.message)
            return True
