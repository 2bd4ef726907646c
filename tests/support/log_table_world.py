"""A log table `db.t`, and the addresses of the rows that its lake table must hold."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from streamhouse.tiering.round._round import RoundResult
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.tiering_world import TieringWorld, rows

__all__ = ["Address", "LogTableWorld", "addresses_in"]

PATH = "db.t"
Address = tuple[int, int]
"""(bucket, offset)"""


class LogTableWorld:
    """Rows are known by their address; `deleted` are those that somebody deleted in the lake.

    Closed by `with`.
    """

    def __init__(self, folder: Path) -> None:
        self.tiering = TieringWorld(folder)
        self.deleted: set[Address] = set()

    def __enter__(self) -> LogTableWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.tiering.__exit__(*error)

    def append(self, count: int, *, bucket: int = 0) -> None:
        """Append rows whose ids are their offsets."""
        start = self.tiering.service.table_state(PATH).positions[bucket].high_watermark
        self.tiering.service.append(PATH, bucket, rows(start, count))

    def tier_rows(self, count: int, *, bucket: int = 0) -> RoundResult:
        """Append rows and move them into the lake in a round of their own."""
        self.append(count, bucket=bucket)
        return self.tiering.tier(PATH)

    def tier_small_files(self, count: int) -> None:
        """Move so many files of ten rows into the lake, each in a round of its own."""
        for _ in range(count):
            self.tier_rows(10)

    def delete(self, *addresses: Address) -> None:
        """Delete rows as a foreign engine does: one position delete file a data file."""
        table = self.tiering.lake_table(PATH)
        files = []
        for task in table.scan().plan_files():
            found = addresses_in(task.file.file_path)
            positions = [n for n, address in enumerate(found) if address in addresses]
            if positions:
                pairs = [(task.file.file_path, n) for n in positions]
                files.append(position_delete_file(table, pairs, partition=task.file.partition))
        commit_delete_files(table, files)
        self.deleted.update(addresses)

    def expected(self) -> list[Address]:
        """The addresses of all rows that were tiered and not deleted."""
        tiered = self.tiering.service.table_state(PATH).lake.tiered_offsets
        every = {(bucket, n) for bucket, end in tiered.items() for n in range(end)}
        return sorted(every - self.deleted)

    def check(self) -> None:
        """Raise unless stock pyiceberg finds every row once, with its own values."""
        found = self.tiering.lake_table(PATH).scan().to_arrow()
        self.check_addresses()
        assert found["id"].to_pylist() == found["__offset"].to_pylist()
        names = [None if i % 3 == 0 else f"n{i}" for i in found["id"].to_pylist()]
        assert found["name"].to_pylist() == names

    def check_addresses(self) -> None:
        """Raise unless stock pyiceberg finds every row once."""
        assert self.tiering.addresses(PATH) == self.expected()


def addresses_in(uri: str) -> list[Address]:
    """The addresses of a data file's rows, in their order."""
    found = pq.read_table(uri.removeprefix("file://"), columns=["__bucket", "__offset"])
    return list(zip(found["__bucket"].to_pylist(), found["__offset"].to_pylist(), strict=True))
