"""The single loop that lands a change of a lake table.

It stages the change, sends it, reloads the table, decides whether an attempt landed, and cleans up.

Guarantees for a change, whatever the catalog answers and when:
- it lands at most once, and only on a state accepted by its `stage`
- after an error other than `UnknownOutcomeError` nothing of the change has landed or will land
- after `UnknownOutcomeError` the change may have landed, or may land later: all its files must
  stay, also the files written by the caller
- the metadata of attempts is deleted once the attempts certainly can never land

`_attempts.py` decides. A reload that returns older metadata than was seen before is ignored.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataV1
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import TableRequirement, TableUpdate
from requests import ConnectTimeout

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    NotFoundError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.lake._attempts import (
    Answer,
    Fate,
    Seen,
    Sent,
    Verdict,
    fate_of,
    judge,
)
from streamhouse.lake.iceberg_errors import lake_errors, sentence_of

__all__ = ["ATTEMPTS_MAX", "Change", "StagedChange", "land", "land_snapshot", "pause", "reload"]

_logger = logging.getLogger(__name__)

ATTEMPTS_MAX: Final = 5
BACKOFF: Final = Backoff(first_s=0.2, most_s=2.0)
# The catalog refused for a reason that is not the table's state, or was not reached.
_REFUSALS: Final = (ForbiddenError, UnauthorizedError, NoSuchTableError, ConnectTimeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChange:
    """A commit ready to be sent.

    A commit that adds a snapshot names the snapshot, its parent and its sequence number, and
    asserts the parent as the current snapshot. `metadata_paths` are the files for this commit only.
    """

    updates: tuple[TableUpdate, ...]
    requirements: tuple[TableRequirement, ...]
    snapshot_id: int | None = None
    parent_id: int | None = None
    sequence_number: int = 0
    metadata_paths: tuple[str, ...] = ()


class Change(Protocol):
    """What is to land."""

    def stage(self, table: Table) -> StagedChange | None:
        """Write the metadata of the change to the table as it is; None: nothing is left to do.

        Called anew for each attempt. A `StreamhouseError` says why the change cannot be made.
        """

    def is_done(self) -> bool:
        """Whether the table already has the effect of a change that makes no snapshot."""


def land(
    table: Table,
    change: Change,
    *,
    before_send: Callable[[], None] = lambda: None,
    attempts_max: int = ATTEMPTS_MAX,
) -> int | None:
    """Land `change` and return the id of its snapshot; `table` is up to date afterwards.

    The id is that of the current snapshot if the change makes none, or if nothing was left to do.
    None if the table has no snapshot either. `before_send` is called before each attempt is sent,
    and may raise.

    Raises:
        UnknownOutcomeError: it may have landed, or may still; see the module.
        StreamhouseError: nothing landed: what `stage` or `before_send` raised, `NotFoundError` when
            the table is gone, `UnavailableError` when no attempt succeeded.
    """
    return _Landing(table, change, before_send).run(attempts_max)


def land_snapshot(
    table: Table,
    change: Change,
    *,
    before_send: Callable[[], None] = lambda: None,
    attempts_max: int = ATTEMPTS_MAX,
) -> int:
    """Land, as `land`, a change that has a snapshot or is refused; return the snapshot's id."""
    snapshot_id = land(table, change, before_send=before_send, attempts_max=attempts_max)
    assert snapshot_id is not None, "the change makes a snapshot, or is refused"
    return snapshot_id


def pause(failures: int) -> None:
    """Wait before trying again, longer with each failed attempt."""
    time.sleep(BACKOFF.jittered_after(failures))


def reload(table: Table) -> bool:
    """Bring `table` up to date; return False, with no change, if the catalog is at an older state.

    Raises whatever the catalog raises, and `NoSuchTableError` when the name is another table's.
    """
    loaded = table.catalog.load_table(table.name())
    metadata = table.metadata
    if loaded.metadata.table_uuid != metadata.table_uuid:
        raise NoSuchTableError(
            f"{'.'.join(table.name())} is another table now: uuid {loaded.metadata.table_uuid}"
            f" instead of {metadata.table_uuid}"
        )
    if _last_sequence_number(loaded.metadata) < _last_sequence_number(metadata):
        return False
    if any(loaded.metadata_location == entry.metadata_file for entry in metadata.metadata_log):
        return False
    table.metadata = loaded.metadata
    table.metadata_location = loaded.metadata_location
    table.io = loaded.io
    table.config = loaded.config
    return True


class _Landing:
    """One run of the loop: it remembers everything that was sent."""

    def __init__(self, table: Table, change: Change, before_send: Callable[[], None]) -> None:
        self._table = table
        self._change = change
        self._before_send = before_send
        self._name = f"lake table '{'.'.join(table.name())}'"
        self._sent: list[tuple[StagedChange, Sent]] = []

    def run(self, attempts_max: int) -> int | None:
        reason = ""
        for attempt in range(attempts_max):
            if attempt:
                pause(attempt)
            staged = self._stage()
            if staged is None:
                self._clean_up()
                return self._current_id
            error = self._send(staged)
            if error is not None:
                reason = f"{type(error).__name__}: {sentence_of(error)}"
                _logger.warning(
                    "event=lake_commit_failed lake_table=%s why=%r", self._name, str(reason)
                )
            verdict, snapshot_id = self._judged(error, is_last=attempt + 1 == attempts_max)
            if verdict is Verdict.LANDED:
                self._clean_up()
                return self._current_id if snapshot_id is None else snapshot_id
            if verdict is not Verdict.RETRY:
                break
        raise self._final_error(
            UnavailableError(
                f"{self._name}: {len(self._sent)} commits failed, the last with {reason}"
            )
        )

    @property
    def _current_id(self) -> int | None:
        snapshot = self._table.metadata.snapshot_by_name(MAIN_BRANCH)
        return None if snapshot is None else snapshot.snapshot_id

    def _stage(self) -> StagedChange | None:
        staged = None
        try:
            with lake_errors(f"write metadata of {self._name}"):
                staged = self._change.stage(self._table)
            if staged is not None:
                self._before_send()
        except StreamhouseError as error:
            if staged is not None:
                # It was never sent.
                self._delete(staged)
            final = self._final_error(error)
            if final is error:
                raise
            raise final from error
        return staged

    def _send(self, staged: StagedChange) -> BaseException | None:
        """Send the commit; return None when it certainly landed, otherwise the error."""
        error: Exception | None = None
        answer = Answer.DONE
        try:
            # Table.transaction() would retry on a newer base by itself; this does not.
            self._table._do_commit(staged.updates, staged.requirements)
            self._check_shown(staged)
        except CommitFailedException as conflict:
            error, answer = conflict, Answer.CONFLICT
        except _REFUSALS as refusal:
            error, answer = refusal, Answer.REFUSED
        except Exception as unknown:  # noqa: BLE001 - whatever a catalog raises, it may have landed
            error, answer = unknown, Answer.UNKNOWN
        sent = Sent(
            snapshot_id=staged.snapshot_id,
            parent_id=staged.parent_id,
            sequence_number=staged.sequence_number,
            answer=answer,
        )
        self._sent.append((staged, sent))
        return error

    def _check_shown(self, staged: StagedChange) -> None:
        """Raise when the answer to a commit does not show its snapshot."""
        if staged.snapshot_id in (None, self._current_id):
            return
        seen = _seen(self._table.metadata)
        if not seen.has_current_from(staged.snapshot_id or 0):
            raise CommitStateUnknownException("the catalog's answer does not show the commit")

    def _judged(self, error: BaseException | None, *, is_last: bool) -> tuple[Verdict, int | None]:
        sent = [sent for _, sent in self._sent]
        if error is None:
            return Verdict.LANDED, sent[-1].snapshot_id
        if any(attempt.answer is not Answer.REFUSED for attempt in sent):
            is_newer = self._look(error)
            if is_newer and self._change.is_done():
                return Verdict.LANDED, None
        return judge(sent, _seen(self._table.metadata), is_last=is_last)

    def _look(self, error: BaseException) -> bool:
        """Bring the table up to date; False if only an older state could be seen."""
        try:
            return reload(self._table)
        except NoSuchTableError as gone:
            raise self._final_error(
                NotFoundError(f"{self._name} was dropped or replaced meanwhile: {gone}")
            ) from gone
        except Exception as reload_error:
            # After any other error of a reload the outcome is unknown.
            raise UnknownOutcomeError(
                f"{self._name}: a commit may have landed ({sentence_of(error)}), and the catalog"
                f" cannot be asked: {sentence_of(reload_error)}"
            ) from reload_error

    def _final_error(self, error: StreamhouseError) -> StreamhouseError:
        """Return what to raise when no attempt is made any more, for `error`; cleans up."""
        self._clean_up()
        if all(self._fate(sent) is Fate.DEAD for _, sent in self._sent):
            return error
        if isinstance(error, UnknownOutcomeError):
            return error
        return UnknownOutcomeError(
            f"{self._name}: a commit may have landed, or may still land; then came: {error}"
        )

    def _fate(self, sent: Sent) -> Fate:
        return fate_of(sent, _seen(self._table.metadata))

    def _clean_up(self) -> None:
        """Delete the metadata of attempts that can never land; leave uncertain attempts alone."""
        for staged, sent in self._sent:
            if sent.answer is not Answer.DONE and self._fate(sent) is Fate.DEAD:
                self._delete(staged)

    def _delete(self, staged: StagedChange) -> None:
        for path in staged.metadata_paths:
            with contextlib.suppress(OSError, StreamhouseError):
                self._table.io.delete(path)


def _seen(metadata: TableMetadata) -> Seen:
    current = metadata.snapshot_by_name(MAIN_BRANCH)
    return Seen(
        current_id=None if current is None else current.snapshot_id,
        last_sequence_number=_last_sequence_number(metadata),
        snapshots={
            snapshot.snapshot_id: (snapshot.parent_snapshot_id, snapshot.sequence_number or 0)
            for snapshot in metadata.snapshots
        },
    )


def _last_sequence_number(metadata: TableMetadata) -> int:
    # Format version 1 has no sequence numbers.
    return 0 if isinstance(metadata, TableMetadataV1) else metadata.last_sequence_number
