"""What became of the latest transactions of a table, and which versions applications committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from streamhouse.storage_service.engine.transactions.transaction_files import Decision
from streamhouse.storage_service.model.transaction import TransactionStatus

__all__ = ["DueForFolding", "TransactionOutcomes"]

# Outcomes with a file of their own; then they are written into one together.
_OWN_FILES_MAX: Final = 64


class DueForFolding(NamedTuple):
    """Outcomes that have files of their own, and all that are remembered."""

    own: Sequence[Decision]
    remembered: Sequence[Decision]


class TransactionOutcomes:
    """At most `outcomes_max` of each: recent ones by id, and the latest of each application.

    The application that has not committed for longest is forgotten first.
    """

    def __init__(self, *, outcomes_max: int) -> None:
        self._outcomes_max = outcomes_max
        self._recent: dict[str, Decision] = {}
        self._latest_of_app: dict[str, Decision] = {}
        self._own: list[Decision] = []

    def find(self, transaction_id: str) -> Decision | None:
        """Return the outcome of a transaction, if it is remembered."""
        return self._recent.get(transaction_id)

    def is_stale(self, app_id: str | None, version: int | None) -> bool:
        """Whether the application has committed this version, or a later one."""
        latest = self.latest_version(app_id)
        return latest is not None and version is not None and latest >= version

    def latest_version(self, app_id: str | None) -> int | None:
        """Return the last version that an application committed, if it is remembered."""
        latest = None if app_id is None else self._latest_of_app.get(app_id)
        return None if latest is None else latest.spec.version or 0

    def add(self, outcome: Decision, *, is_folded: bool = False) -> None:
        """Remember an outcome; `is_folded` says that it has no file of its own."""
        self._recent[outcome.spec.transaction_id] = outcome
        spec = outcome.spec
        is_committed = outcome.result.status is TransactionStatus.COMMITTED
        if is_committed and spec.app_id and not self.is_stale(spec.app_id, spec.version):
            self._latest_of_app.pop(spec.app_id, None)
            self._latest_of_app[spec.app_id] = outcome
        for known in (self._recent, self._latest_of_app):
            if len(known) > self._outcomes_max:
                del known[next(iter(known))]
        if not is_folded:
            self._own.append(outcome)

    def take_due(self) -> DueForFolding | None:
        """Return what should be folded into one file now, once; None if nothing should."""
        if len(self._own) < _OWN_FILES_MAX:
            return None
        own, self._own = self._own, []
        remembered = {
            outcome.spec.transaction_id: outcome
            for outcome in (*self._latest_of_app.values(), *self._recent.values())
        }
        return DueForFolding(own, sorted(remembered.values(), key=_time))


def _time(outcome: Decision) -> int:
    return outcome.result.timestamp_us
