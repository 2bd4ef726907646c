"""A tiering world with maintenance, and the obvious model of what the lake must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamhouse.storage_service.lake.commits.committer import IcebergLakeTable
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.tiering.maintain.maintenance import Maintainer
from streamhouse.tiering.maintain.maintenance_policy import Claim, MaintenancePolicy
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from streamhouse.tiering.round.round import RoundResult
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.tiering_world import TieringWorld, rows

__all__ = ["MaintenanceWorld"]

Address = tuple[int, int]


class MaintenanceWorld(TieringWorld):
    """Rows are known by their address; `deleted` are those that somebody deleted in the lake."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.deleted: set[Address] = set()
        self._maintainer: Maintainer | None = None

    def maintainer(self, **more: Any) -> Maintainer:
        """A new worker's maintainer."""
        filesystem = LakeFilesystem(self.catalog.properties)
        return Maintainer(pins=self.service, runner=self.runner, filesystem=filesystem, **more)

    def open(self, path: str = "db.t") -> IcebergLakeTable:
        """The lake table as a worker opens it."""
        state = self.service.table_state(path)
        return self.lake().open_or_create(state.table, state.lake)

    def maintain(
        self,
        maintainer: Maintainer | None = None,
        *,
        path: str = "db.t",
        policy: MaintenancePolicy | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> MaintenanceReport:
        """Maintain as a worker does that holds the table's newest claim."""
        state = self.service.table_state(path)
        claim = Claim(
            epoch=state.lake.tiering_epoch, snapshot_id=state.lake.snapshot_id, check=check
        )
        chosen = maintainer or self.maintainer()
        return chosen.maintain(self.open(path), state.table, claim, policy=policy)

    def policy(self, path: str = "db.t") -> MaintenancePolicy:
        """What the table's properties ask for, due or not."""
        return MaintenancePolicy.of(self.service.describe_table(path))

    def on_demand(self, path: str = "db.t") -> MaintenancePolicy:
        """The policy of `streamhouse maintain`."""
        return self.policy(path).on_demand()

    def append(self, count: int, *, bucket: int = 0, path: str = "db.t") -> None:
        """Append rows whose ids are their offsets."""
        start = self.service.table_state(path).positions[bucket].high_watermark
        self.service.append(path, bucket, rows(start, count))

    def tier_rows(self, count: int, *, bucket: int = 0, path: str = "db.t") -> RoundResult:
        """Append rows and move them into the lake in a round of their own."""
        self.append(count, bucket=bucket, path=path)
        return self.tier(path)

    def delete(self, *addresses: Address, path: str = "db.t") -> None:
        """Delete rows as a foreign engine does: one position delete file a data file."""
        table = self.lake_table(path)
        files = []
        for task in table.scan().plan_files():
            found = self._addresses_in(task.file.file_path)
            positions = [n for n, address in enumerate(found) if address in addresses]
            if positions:
                pairs = [(task.file.file_path, n) for n in positions]
                files.append(position_delete_file(table, pairs, partition=task.file.partition))
        commit_delete_files(table, files)
        self.deleted.update(addresses)

    def expected(self, path: str = "db.t") -> list[Address]:
        """The addresses of all rows that were tiered and not deleted."""
        tiered = self.service.table_state(path).lake.tiered_offsets
        every = {(bucket, n) for bucket, end in tiered.items() for n in range(end)}
        return sorted(every - self.deleted)

    def check(self, path: str = "db.t") -> None:
        """Raise unless stock pyiceberg finds every row once, with its own values."""
        found = self.lake_table(path).scan().to_arrow()
        self.check_addresses(path)
        assert found["id"].to_pylist() == found["__offset"].to_pylist()
        names = [None if i % 3 == 0 else f"n{i}" for i in found["id"].to_pylist()]
        assert found["name"].to_pylist() == names

    def check_addresses(self, path: str = "db.t") -> None:
        """Raise unless stock pyiceberg finds every row once."""
        assert self.addresses(path) == self.expected(path)

    def _addresses_in(self, uri: str) -> list[Address]:
        import pyarrow.parquet as pq

        found = pq.read_table(uri.removeprefix("file://"), columns=["__bucket", "__offset"])
        return list(zip(found["__bucket"].to_pylist(), found["__offset"].to_pylist(), strict=True))
