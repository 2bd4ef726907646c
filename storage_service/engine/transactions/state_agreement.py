"""Consistency between a table's files: other files reveal an old or missing file.

Each rule compares durable facts without additional writes:
- rows that have left the log are in the lake, unless retention deleted rows of a table without a
  lake
- the lake has only overwrites of the table
- the rows of transactions in a log belong to decided transactions
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

    `decisions` are the remembered decisions; `transactions_us` has the time of each bucket's last
    transaction rows, 0 if unknown. `log_starts` are the starts of the logs; rows below
    `forgotten_offsets` may be missing from log and lake.
    """
    for bucket, start in log_starts.items():
        last_number = max(
            lake.tiered_offsets.get(bucket, 0),
            truncated_offsets.get(bucket, 0),
            forgotten_offsets.get(bucket, 0),
        )
        if start > last_number:
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
