"""The outcomes of a table's latest transactions, and the versions committed by applications.

A caller without the answer of a commit asks again and gets the truth: the remembered outcome, the
error of the refused commit, or the certainty that nothing was written. The last answer needs proof
that no forgotten outcome belongs to the transaction: a transaction's id begins with the number of
the next decision at its begin, so the transaction's own number is not smaller, and the greatest
forgotten number is remembered.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable, Sequence
from typing import Final, NamedTuple

from streamhouse.core.errors import InvalidRequestError, StreamhouseError
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionSpec,
)

__all__ = ["DueForFolding", "Refusal", "Skip", "TransactionOutcomes", "new_transaction_id"]

# Outcomes with a file of their own; then they are written into one together.
_OWN_FILES_MAX: Final = 64
_NUMBERED: Final = re.compile(r"([0-9]{1,18})-[0-9a-f]{32}")


class DueForFolding(NamedTuple):
    """Outcomes in files of their own, and all remembered outcomes."""

    own: Sequence[Decision]
    remembered: Sequence[Decision]


class Refusal(NamedTuple):
    """A transaction with a failed commit: nothing was written."""

    spec: TransactionSpec
    row_count: int
    error: StreamhouseError
    timestamp_us: int


class Skip(NamedTuple):
    """A transaction that did not begin, because its version was committed before."""

    spec: TransactionSpec
    timestamp_us: int


class TransactionOutcomes:
    """At most `outcomes_max` of each: recent outcomes by id, and the latest of each application.

    The application with the oldest commit is forgotten first. `former_streams` wrote a dropped
    table of the same name.
    """

    def __init__(self, *, outcomes_max: int, former_streams: Container[str] = ()) -> None:
        self._outcomes_max = outcomes_max
        self._former_streams = former_streams
        self._recent: dict[str, Decision] = {}
        self._latest_of_app: dict[str, Decision] = {}
        self._own: list[Decision] = []
        self._refused: dict[str, Refusal] = {}
        self._skipped: dict[tuple[str | None, int | None], Skip] = {}
        self._forgotten = 0

    def loaded(self, next_number: int) -> None:
        """Set the number of the next decision, after all outcomes on disk were added."""
        remembered = {outcome.number for outcome in self._recent.values()}
        number = next_number - 1
        while number in remembered:
            number -= 1
        self._forgotten = number

    def refuse(self, refusal: Refusal) -> None:
        """Remember the error of a failed commit until the service ends."""
        self._refused[refusal.spec.transaction_id] = refusal
        if len(self._refused) > self._outcomes_max:
            del self._refused[next(iter(self._refused))]

    def refusal(self, transaction_id: str) -> StreamhouseError | None:
        """Return the remembered error of a transaction's commit, if any."""
        refusal = self._refused.get(transaction_id)
        return None if refusal is None else refusal.error

    @property
    def refusals(self) -> Iterable[Refusal]:
        """The remembered failed commits."""
        return self._refused.values()

    def skip(self, skip: Skip) -> bool:
        """Remember a skip until the service ends; return whether the version is new."""
        key = (skip.spec.app_id, skip.spec.version)
        is_new = self._skipped.pop(key, None) is None
        self._skipped[key] = skip
        if len(self._skipped) > self._outcomes_max:
            del self._skipped[next(iter(self._skipped))]
        return is_new

    @property
    def skips(self) -> Iterable[Skip]:
        """The skipped versions, each at its latest skip."""
        return self._skipped.values()

    @property
    def remembered(self) -> Iterable[Decision]:
        """All remembered outcomes, each once."""
        return {
            outcome.spec.transaction_id: outcome
            for outcome in (*self._latest_of_app.values(), *self._recent.values())
        }.values()

    def is_uncommitted(self, transaction_id: str) -> bool:
        """Whether a closed transaction without a remembered outcome was certainly not committed."""
        # Ids of former releases have no number.
        match = _NUMBERED.fullmatch(transaction_id)
        return match is not None and int(match[1]) > self._forgotten

    def find(self, transaction_id: str) -> Decision | None:
        """Return the outcome of a transaction, if remembered."""
        return self._recent.get(transaction_id)

    def is_stale(self, app_id: str | None, version: int | None) -> bool:
        """Whether the application has committed this version, or a later version."""
        latest = self.latest_version(app_id)
        return latest is not None and version is not None and latest >= version

    def check_stream(self, spec: TransactionSpec, *, table: str) -> None:
        """Raise `InvalidRequestError` for a stream whose earlier rows were dropped."""
        if spec.source in self._former_streams:
            raise InvalidRequestError(
                f"table '{table}' was dropped after stream {spec.source} had written it, and the"
                " table of this name lacks the rows of the stream's earlier batches; start the"
                " stream with a new checkpoint, which writes all rows again. Nothing was written"
            )

    def check_repeated(self, spec: TransactionSpec, *, table: str) -> None:
        """Raise `InvalidRequestError` if a stale version repeats no committed transaction.

        A different `source`, or the same `source` and `run` with different rows, is no repetition.
        Without a stated source the version counts as a repetition.
        """
        latest = None if spec.app_id is None else self._latest_of_app.get(spec.app_id)
        if latest is None or not self.is_stale(spec.app_id, spec.version):
            return
        earlier = latest.spec
        if spec.source and earlier.source and spec.source != earlier.source:
            raise InvalidRequestError(
                f"table '{table}': application '{spec.app_id}' has committed versions up to"
                f" {earlier.version} for stream {earlier.source}, and stream {spec.source}, with"
                f" another checkpoint, begins version {spec.version} of its own; give it another"
                " app_id, or go on with the earlier checkpoint. Nothing was written"
            )
        if spec.run and (spec.run, spec.version) == (earlier.run, earlier.version):
            raise InvalidRequestError(
                f"table '{table}': version {spec.version} of application '{spec.app_id}' is"
                " written a second time in one micro-batch, and the table would take that for a"
                " repetition; write the union of the rows, or give each write an app_id of its"
                " own. Nothing was written by this one"
            )

    @property
    def streams(self) -> set[str]:
        """The streams that have committed rows, of the applications remembered."""
        return {o.spec.source for o in self._latest_of_app.values() if o.spec.source}

    def latest_version(self, app_id: str | None) -> int | None:
        """Return the last version committed by an application, if remembered."""
        latest = None if app_id is None else self._latest_of_app.get(app_id)
        return None if latest is None else latest.spec.version or 0

    def add(self, outcome: Decision, *, is_folded: bool = False) -> None:
        """Remember an outcome; `is_folded` marks an outcome without a file of its own."""
        self._recent[outcome.spec.transaction_id] = outcome
        spec = outcome.spec
        is_committed = outcome.result.status is TransactionStatus.COMMITTED
        if is_committed and spec.app_id and not self.is_stale(spec.app_id, spec.version):
            self._latest_of_app.pop(spec.app_id, None)
            self._latest_of_app[spec.app_id] = outcome
        if len(self._recent) > self._outcomes_max:
            forgotten = self._recent.pop(next(iter(self._recent)))
            self._forgotten = max(self._forgotten, forgotten.number)
        if len(self._latest_of_app) > self._outcomes_max:
            del self._latest_of_app[next(iter(self._latest_of_app))]
        if not is_folded:
            self._own.append(outcome)

    def take_due(self) -> DueForFolding | None:
        """Return the outcomes to be folded into one file now, once; None if nothing is due."""
        if len(self._own) < _OWN_FILES_MAX:
            return None
        due, self._own = self._own, []
        return DueForFolding(due, sorted(self.remembered, key=_time))


def new_transaction_id(next_number: int) -> str:
    """Return an unguessable id of a transaction begun before decision `next_number`."""
    return f"{next_number}-{secrets.token_hex(16)}"


def _time(outcome: Decision) -> int:
    return outcome.result.timestamp_us
