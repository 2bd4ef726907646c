"""A log table that one writer overwrites all the time: every cut has the rows of one overwrite."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pyarrow as pa

from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.errors import OffsetOutOfRangeError, SnapshotNotFoundError
from tests.torture.checkers import lake_names, lake_table
from tests.torture.ledger import AppendLedger
from tests.torture.writers import TransactionWriter

__all__ = ["OverwriteChecker", "Overwriter"]

_ATTEMPTS: Final = 10


class Overwriter(TransactionWriter):
    """Each of its transactions replaces the rows of the one before; some leave the table empty."""

    OPERATION = "overwrite"

    def parts_of(self, version: int) -> int:
        return _parts_of(version)


class OverwriteChecker:
    """The table has the last overwrite that was acknowledged, or one that was sent since."""

    def __init__(self, table: str, ledger: AppendLedger) -> None:
        self.table = table
        self.ledger = ledger
        self._last = 0

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge the rows there are; return how many."""
        return self.check_cut(client)

    def check_cut(self, client: StreamhouseClient) -> int:
        """Read a cut over both tiers: it has all rows of one overwrite, and no others."""
        for _, number in self.ledger.take_acknowledged():
            self._last = max(self._last, number)
        rows = self._read(client)
        if rows is None:
            return 0
        found = Counter(rows.column("number").to_pylist())
        newest = self.ledger.newest()
        assert any(found == _rows_of(n) for n in range(self._last, newest + 1)), (
            f"{self.table}: it has {dict(found)}, but overwrite {self._last} was acknowledged, and"
            f" the newest that was sent is {newest}"
        )
        return rows.num_rows

    def check_lake(self, client: StreamhouseClient) -> None:
        """Compare every layout of the lake, all of it tiered, with the last overwrite."""
        self.check_cut(client)
        if client.table_state(self.table).lake.snapshot_id is None:
            assert not _rows_of(self._last), f"{self.table}: its rows never came to the lake"
            return
        for name in lake_names(client, self.table):
            lake = lake_table(client, name).scan(selected_fields=("number",)).to_arrow()
            found = Counter(lake.column("number").to_pylist())
            assert found == _rows_of(self._last), f"{name}: the lake differs: {dict(found)}"

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Nothing is left to judge: every check looks at every row."""

    def _read(self, client: StreamhouseClient) -> pa.Table | None:
        """Read the table; None if each time it was overwritten between the plan and the read."""
        for _ in range(_ATTEMPTS):
            try:
                return client.read(self.table, columns=["number"])
            except (OffsetOutOfRangeError, SnapshotNotFoundError):
                continue
        return None


def _parts_of(number: int) -> int:
    # Number 0 stands for the table before the first overwrite.
    return TransactionWriter.PARTS if number % 7 else 0


def _rows_of(number: int) -> Counter[int]:
    """Return the rows that an overwrite leaves."""
    return +Counter({number: _parts_of(number) * TransactionWriter.ROWS})
