"""An owner's directory, and one to which its files are copied as they change, with warm rows.

Rows by key of the copy are followed as by a standby, from the files alone.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.followed.followed_logs import FollowedLogs, LogTables
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.engine.keys.warm_tables import WarmTables
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.transactions.stored_decisions import is_committing
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import EVENTS, table_descriptor

__all__ = ["TABLE", "FollowedWorld"]

TABLE = TablePath.parse("default.keyed")


class FollowedWorld:
    """See the module; `owner` is served by `manager`."""

    def __init__(self, folder: Path, manager: TabletManager) -> None:
        self.owner, self.standby = folder / "owner", folder / "standby"
        self.manager = manager
        self.standby.mkdir()
        self._copied: dict[str, bytes] = {}
        self._open()

    def _open(self) -> None:
        self.tables = WarmTables()
        directory = DataDirectory(self.standby)
        self.warm = WarmRows(
            directory,
            ServiceConfig(data_dir=self.standby),
            tables=self.tables,
            is_committing=is_committing,
        )
        self.logs = LogTables()
        self.followed = FollowedLogs(directory, rows=self.warm, tables=self.logs)

    def restart(self) -> None:
        """Close what follows with all rows flushed, and open it again."""
        for warm in self.warm._buckets.values():
            warm.rows.flush()
        self.close()
        self._open()
        self.warm.open_all()

    async def create(self, **properties: str) -> None:
        await self.manager.create_table(
            table_descriptor(str(TABLE), primary_key=("id",), properties=properties)
        )

    async def write(self, ids: list[int], name: str) -> None:
        table = self.manager.table(TABLE)
        assert isinstance(table, KeyTable)
        rows = pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)
        await self.manager.write_keys(table, [KeyWrite(0, rows)], columns=None, writer_id=0)

    def copy(self) -> set[str]:
        """Copy what has changed, and remove what is gone; return the paths of changed files."""
        changed, present = set(), set()
        for source in sorted(self.owner.rglob("*")):
            path = source.relative_to(self.owner).as_posix()
            if not source.is_file() or "/kv" in path or path == "LOCK":
                continue
            data = source.read_bytes()
            present.add(path)
            if self._copied.get(path) != data:
                self._copied[path] = data
                (self.standby / path).parent.mkdir(parents=True, exist_ok=True)
                (self.standby / path).write_bytes(data)
                changed.add(path)
        for path in self._copied.keys() - present:
            del self._copied[path]
            (self.standby / path).unlink()
        return changed

    def follow(self) -> None:
        changed = self.copy()
        self.warm.follow(changed)
        self.followed.follow(changed)

    def open_log(self, path: TablePath = TABLE) -> None:
        """Open a table's logs, as for a fetch."""
        self.logs.ask(path)
        self.followed.open_asked()

    def close(self) -> None:
        self.followed.close()
        self.warm.close()

    def applied_offset(self) -> int:
        (warm,) = self.warm._buckets.values()
        return warm.rows.applied_offset
