"""A log table that one writer overwrites all the time: every cut has the rows of one overwrite."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import OffsetOutOfRangeError, SnapshotNotFoundError
from tests.torture.aging import (
    TableAges,
    age_out,
    check_layouts,
    differs,
    lake_rows,
    read_cut,
)
from tests.torture.checkers import lake_names, lake_table
from tests.torture.ledger import AppendLedger
from tests.torture.writers import TransactionWriter

__all__ = ["AgingOverwriteChecker", "AgingOverwriter", "OverwriteChecker", "Overwriter"]

_ATTEMPTS: Final = 10


class Overwriter(TransactionWriter):
    """Each of its transactions replaces the rows of the one before; some leave the table empty."""

    OPERATION = "overwrite"

    def parts_of(self, version: int) -> int:
        return _parts_of(version)


class AgingOverwriter(Overwriter):
    """One that leaves its rows the time to grow old, sometimes."""

    def write(self) -> int:
        threading.Event().wait(self.random.uniform(0.0, 0.8))
        return super().write()


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
        self._take_acknowledged()
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

    def _take_acknowledged(self) -> None:
        for _, number in self.ledger.take_acknowledged():
            self._last = max(self._last, number)

    def _read(self, client: StreamhouseClient) -> pa.Table | None:
        """Read the table; None if each time it was overwritten between the plan and the read."""
        for _ in range(_ATTEMPTS):
            try:
                return client.read(self.table, columns=["number"])
            except (OffsetOutOfRangeError, SnapshotNotFoundError):
                continue
        return None


class AgingOverwriteChecker(OverwriteChecker):
    """The same of a table with a time to live: the oldest of its rows may have gone, or all."""

    def __init__(self, table: str, ledger: AppendLedger, ttl_ms: int) -> None:
        super().__init__(table, ledger)
        self.ages = TableAges(table, ttl_ms * 1000, has_copies=True)

    def check_cut(self, client: StreamhouseClient) -> int:
        """Each layout has all rows of one overwrite but for those that have expired."""
        self._take_acknowledged()
        cut = read_cut(self.ages, client)
        if cut is None:
            return 0
        judged = check_layouts(self.ages, *cut)
        state, layouts = cut
        written = sum(at.high_watermark - at.truncated_offset for at in state.positions.values())
        numbers = {number for rows in layouts for number in rows.column("number").to_pylist()}
        newest = self.ledger.newest()
        fitting = {n for n in range(self._last, newest + 1) if _rows_of(n).total() == written}
        assert numbers in [set(), *({number} for number in fitting)], (
            f"{self.table}: it was left {written} rows, and has some of overwrites {numbers}, but"
            f" {self._last} was acknowledged, and the newest that was sent is {newest}"
        )
        assert fitting, f"{self.table}: no overwrite since {self._last} left {written} rows"
        return judged

    def check_lake(self, client: StreamhouseClient) -> None:
        """Every lake table has all rows that have not expired, and none that was overwritten."""
        self.check_cut(client)
        for name, rows, ends in lake_rows(client, self.table):
            found = self.ages.add_all(rows)
            for bucket, at in self.ages.look(client).positions.items():
                offsets = found.get(bucket, [])
                assert not offsets or offsets[0] >= at.truncated_offset, (
                    f"{name}, bucket {bucket}: offset {offsets[0]} was overwritten"
                )
                wanted = range(at.first_offset, ends[bucket])
                inside = [offset for offset in offsets if offset >= at.first_offset]
                assert inside == list(wanted), differs(f"{name}, bucket {bucket}", inside, wanted)

    def check_at_end(self, client: StreamhouseClient) -> None:
        """All rows leave in the end."""
        self.check_lake(client)
        age_out(client, self.table, self.ages)


def _parts_of(number: int) -> int:
    # Number 0 stands for the table before the first overwrite.
    return TransactionWriter.PARTS if number % 7 else 0


def _rows_of(number: int) -> Counter[int]:
    """Return the rows that an overwrite leaves."""
    return +Counter({number: _parts_of(number) * TransactionWriter.ROWS})
