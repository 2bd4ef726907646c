"""What a table's files say of each other: an old or missing one is known by the others.

Each rule compares what is durable anyway, so that nothing is written for it:
- rows that the log has no more are in the lake, unless retention deleted them without a lake
- the lake has no overwrite that the table has not
- the rows of a transaction in a log are of a transaction that is known to be decided
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.storage_service.engine.transactions.transaction_files import Decision

__all__ = ["disagreements"]


def disagreements(
    lake: LakeState,
    *,
    truncated_offsets: Mapping[int, int],
    decisions: Iterable[Decision],
    transactions_us: Mapping[int, int],
    log_starts: Mapping[int, int],
    forgotten_offsets: Mapping[int, int],
) -> Iterator[str]:
    """Yield a sentence for each contradiction between the files of one table.

    `decisions` are those of its transactions that are remembered, `transactions_us` says per bucket
    when the last rows of a transaction were written, 0 if that is not known. `log_starts` are where
    the logs begin, `forgotten_offsets` below which rows may be nowhere.
    """
    for bucket, start in log_starts.items():
        known = max(
            lake.tiered_offsets.get(bucket, 0),
            truncated_offsets.get(bucket, 0),
            forgotten_offsets.get(bucket, 0),
        )
        if start > known:
            yield (
                f"bucket {bucket}: rows below {start} left the log because the lake has them, but"
                f" lake.json says that it has those below {lake.tiered_offsets.get(bucket, 0)}: it"
                " is an old version"
            )
    decided_us = max(
        (
            decision.result.timestamp_us
            for decision in decisions
            if decision.result.status is not TransactionStatus.SKIPPED
        ),
        default=0,
    )
    for bucket, written_us in transactions_us.items():
        if written_us > decided_us:
            yield (
                f"bucket {bucket}: the log has rows of a transaction whose decision is missing from"
                " transactions/, or outcomes there is an old version"
            )
    for bucket, offset in lake.truncated_offsets.items():
        if offset > truncated_offsets.get(bucket, 0):
            yield (
                f"bucket {bucket}: rows below {offset} were overwritten, says lake.json, but"
                f" transactions/truncated says {truncated_offsets.get(bucket, 0)}: it is an old"
                " version"
            )
