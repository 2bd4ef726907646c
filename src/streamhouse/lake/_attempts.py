"""The fate of each commit sent for a change of a lake table: a pure judgement.

A catalog may not answer, may answer late, may have applied a commit and still refuse it (a proxy
sent the commit twice), and may show an older state than the newest. The judgement of an attempt is
- landed only when its snapshot is the current snapshot or an ancestor
- dead only when the catalog refused it for a reason beyond the table's state, or when it can land
  no more and no existing snapshot descends from it
- unsettled otherwise: its files must stay

Every attempt asserts the snapshot of its staging, and brings a sequence number above all earlier
numbers of the table. A table never gives a number twice (Iceberg spec, "Sequence Numbers"), not
even after a rollback: after this number, or a later number, an attempt on its way can land no more.
A landed attempt may be hidden, when its snapshot and a later snapshot were expired; no look at the
table can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Answer", "Fate", "Seen", "Sent", "Verdict", "fate_of", "judge"]


class Answer(Enum):
    """A catalog's answer to a commit."""

    DONE = "done"
    REFUSED = "refused"
    """The catalog did nothing, for a reason beyond the table's state."""
    CONFLICT = "conflict"
    """The table is not as asserted: perhaps because the commit itself arrived twice."""
    UNKNOWN = "unknown"


class Fate(Enum):
    """The fate of a commit."""

    LANDED = "landed"
    DEAD = "dead"
    UNSETTLED = "unsettled"


class Verdict(Enum):
    """What is to be done after a look."""

    LANDED = "landed"
    RETRY = "retry"
    REFUSED = "refused"
    """Nothing landed and nothing will: what was written for it may go."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A commit that was sent, and its answer.

    A commit without a snapshot (`snapshot_id` None) has no files of its own.
    """

    snapshot_id: int | None
    parent_id: int | None
    sequence_number: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A table as loaded: `snapshots` has the parent and sequence number of each."""

    current_id: int | None
    last_sequence_number: int
    snapshots: Mapping[int, tuple[int | None, int]]

    def has_current_from(self, snapshot_id: int) -> bool:
        """Whether the current snapshot is, or visibly descends from, `snapshot_id`."""
        ancestor_id = self.current_id
        while ancestor_id is not None and ancestor_id in self.snapshots:
            if ancestor_id == snapshot_id:
                return True
            ancestor_id = self.snapshots[ancestor_id][0]
        return False


def fate_of(sent: Sent, seen: Seen) -> Fate:
    """Return the fate of `sent`, judged by the newest state of the table."""
    if sent.snapshot_id is not None and seen.has_current_from(sent.snapshot_id):
        return Fate.LANDED
    if sent.answer is Answer.DONE:
        # Rolled back since, or hidden: it did land.
        return Fate.UNSETTLED
    if sent.answer is Answer.REFUSED:
        return Fate.DEAD
    if sent.snapshot_id is None:
        return Fate.DEAD if sent.answer is Answer.CONFLICT else Fate.UNSETTLED
    if not _is_sealed(sent, seen) or _may_have_left_files(sent, seen):
        return Fate.UNSETTLED
    return Fate.DEAD


def judge(sent: Sequence[Sent], seen: Seen, *, is_last: bool) -> tuple[Verdict, int | None]:
    """Return the next step, and the snapshot after `LANDED`; `is_last`: no more attempts."""
    for attempt in sent:
        if fate_of(attempt, seen) is Fate.LANDED:
            return Verdict.LANDED, attempt.snapshot_id
    if not is_last and sent[-1].answer is not Answer.REFUSED:
        return Verdict.RETRY, None
    is_over = all(fate_of(attempt, seen) is Fate.DEAD for attempt in sent)
    return (Verdict.REFUSED if is_over else Verdict.UNKNOWN), None


def _is_sealed(sent: Sent, seen: Seen) -> bool:
    """Whether the commit can land no more."""
    if seen.current_id == sent.parent_id or seen.last_sequence_number < sent.sequence_number:
        return False
    # A snapshot without a parent may have any number, and a main branch can be removed: only an
    # answer proves that the attempt is no longer on its way.
    return sent.parent_id is not None or sent.answer is Answer.CONFLICT


def _may_have_left_files(sent: Sent, seen: Seen) -> bool:
    """Whether an existing snapshot is the snapshot of `sent`, or may descend from it."""
    if sent.snapshot_id in seen.snapshots:
        return True
    return any(_may_come_from(snapshot_id, sent, seen) for snapshot_id in seen.snapshots)


def _may_come_from(snapshot_id: int, sent: Sent, seen: Seen) -> bool:
    ancestor_id: int | None = snapshot_id
    while ancestor_id is None or ancestor_id != sent.parent_id:
        if ancestor_id is None or ancestor_id not in seen.snapshots:
            # The parent was expired; some catalogs then report no parent.
            return True
        ancestor_id, sequence_number = seen.snapshots[ancestor_id]
        if sequence_number <= sent.sequence_number:
            return False
    return False
