"""The other shards of a service, for the routes of a process with one shard.

The shard directory is in the object store. Reads of the shard directory run on a separate thread
pool: a store that does not answer must not delay requests for rows. Tables of this shard need no
read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from streamhouse.core.errors import (
    DatabaseNotFoundError,
    NotOwnerError,
    StreamhouseError,
    UnavailableError,
    suggestion,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.threads import Pool
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.upkeep.jobs import Job
from streamhouse.storage_service.ownership.shards.chain import Each
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory, ShardRecord
from streamhouse.storage_service.ownership.shards.entries import NameEntry, NameState
from streamhouse.storage_service.ownership.shards.owners import LeaseOwners, Owner
from streamhouse.storage_service.ownership.shards.placement import least_loaded, table_counts
from streamhouse.storage_service.server.shards.peers import HttpPeers

__all__ = ["ShardState", "Shards"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_THREADS: Final = 4
RECORD_INTERVAL_MS: Final = 10_000
_ENDPOINTS_KEPT_S: Final = 10.0
_LOAD_INTERVAL_S_MIN: Final = 5.0
# A smaller change is noise, and each record is a stored object.
_LOAD_CHANGE_MILLICORES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """One shard, as another process sees the shard."""

    shard: str
    owner: Owner | None
    load_millicores: int
    table_count: int

    @property
    def is_live(self) -> bool:
        """Whether the owner's lease was renewed lately."""
        return self.owner is not None and self.owner.is_live

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        owner = self.owner
        return {
            "shard": self.shard,
            "endpoint": None if owner is None else owner.endpoint,
            "epoch": 0 if owner is None else owner.epoch,
            "is_live": self.is_live,
            "load_millicores": self.load_millicores,
            "table_count": self.table_count,
        }

    def target(self) -> dict[str, Any] | None:
        """Return the Prometheus target of the shard's metrics; None while no live owner exists."""
        owner = self.owner
        if owner is None or not self.is_live or owner.endpoint is None:
            return None
        where = urlsplit(owner.endpoint)
        labels = {"shard": self.shard, "__scheme__": where.scheme}
        return {"targets": [where.netloc], "labels": labels}


class Shards:
    """This shard among all shards. Event loop only, except for the functions run on the pool."""

    def __init__(
        self,
        directory: ShardDirectory,
        owners: LeaseOwners,
        manager: TabletManager,
        peers: HttpPeers,
        *,
        each: Each = map,
        figures: Callable[[], dict[str, Any] | None] = lambda: None,
        load_millicores: Callable[[], int] | None = None,
    ) -> None:
        """Read the other shards' state from the store.

        `each` maps a function over many leases, as for `ShardDirectory`. `figures` returns the
        figures of this shard's journal. `load_millicores` returns the load of this shard; without
        the function, the load of this process is measured.
        """
        self.peers = peers
        self.figures = figures
        self._each = each
        self.own = directory.shard
        self._directory = directory
        self._owners = owners
        self._manager = manager
        self._threads = Pool("shards", _THREADS)
        self._load_millicores = load_millicores or _Load().millicores
        self._recorded: ShardRecord | None = None
        self._elsewhere_last: dict[TablePath, str] = {}
        self._endpoints: list[str] = []
        self._endpoints_until_s = 0.0
        self._ids: dict[int, TablePath] = {}
        self._reading_ids = asyncio.Lock()
        self._ids_begun = 0
        self._ids_read = 0

    def close(self) -> None:
        """Wait for the running reads of the shard directory, then end the threads."""
        self._threads.shutdown()

    def jobs(self) -> list[Job]:
        """Return the job that publishes this shard's record."""
        return [
            Job(
                name="shard_record",
                every_ms=RECORD_INTERVAL_MS,
                look=self.publish_record,
                is_eager=True,
            )
        ]

    # -- where tables are ------------------------------------------------------------------------

    async def elsewhere(self, path: TablePath) -> NotOwnerError | None:
        """Return the error that names the table's shard; None if no other shard has the table."""
        return await self._run(self._elsewhere, path)

    def _elsewhere(self, path: TablePath) -> NotOwnerError | None:
        entry = self._directory.entry(path)
        if entry.state is not NameState.HELD or entry.shard == self.own:
            return None
        return self._not_owner(path, entry.shard)

    async def endpoint_of(self, path: TablePath) -> str | None:
        """Return the endpoint of another shard's table; None if no other shard has the table.

        Raises `UnavailableError` if the shard has no live owner.
        """
        error = await self.elsewhere(path)
        if error is None or error.owner is not None:
            return None if error is None else error.owner
        raise UnavailableError(error.message)

    async def names(self) -> set[TablePath]:
        """Return all names in the shard directory, including names without a table."""
        return await self._run(self._directory.names)

    async def endpoint_of_shard(self, shard: str) -> str:
        """Return the endpoint of a shard; raises `UnavailableError` without a live owner."""
        owner = await self._run(self._owners.of, shard)
        if owner is None or not owner.is_live or owner.endpoint is None:
            raise UnavailableError(f"shard '{shard}' has no owner that is alive")
        return owner.endpoint

    async def place(self, path: TablePath) -> None:
        """Assign the name of a new table to the least loaded shard; return if this is the shard.

        Raises `NotOwnerError` if another shard has to create the table, and `TableExistsError`.
        """
        await self._run(self._place, path)

    async def claim(self, path: TablePath) -> None:
        """Assign the name of a new table to this shard, whatever the load; raises as `place`."""
        await self._run(self._place, path, self.own)

    def _place(self, path: TablePath, requested_shard: str | None = None) -> None:
        records = self._directory.records()
        owners = self._owners_of(records)
        live = {shard for shard, owner in owners.items() if owner is not None and owner.is_live}
        best = requested_shard or least_loaded(
            live,
            records=records,
            tables=table_counts(self._directory.readable_entries().values()),
            own=self.own,
        )
        shard = self._directory.assign(
            path, best, is_live=lambda name: name == self.own or name in live
        )
        if shard != self.own:
            raise self._not_owner(path, shard)

    def _owners_of(self, shards: Iterable[str]) -> dict[str, Owner | None]:
        names = list(shards)
        return dict(zip(names, self._each(self._owners.of, names), strict=True))

    def _not_owner(self, path: TablePath, shard: str) -> NotOwnerError:
        owner = self._owners.of(shard)
        # The client sends its token to this endpoint: a dead owner's address may be reused.
        endpoint = None if owner is None or not owner.is_live else owner.endpoint
        where = "which has no live owner" if endpoint is None else f"which answers at {endpoint}"
        return NotOwnerError(f"table '{path}' is in shard '{shard}', {where}", owner=endpoint)

    # -- all shards ------------------------------------------------------------------------------

    async def tables(self) -> dict[TablePath, str]:
        """Return every table with the name of its shard; tables of this shard are up to date."""
        try:
            entries = await self._run(self._directory.readable_entries)
        except StreamhouseError as error:
            # A list is always of a past moment, and this shard's tables need no read.
            _logger.warning("event=directory_unreadable why=%r", error.message)
        else:
            self._elsewhere_last = {
                path: entry.shard for path, entry in entries.items() if self._is_elsewhere(entry)
            }
        return {**self._elsewhere_last, **dict.fromkeys(self._manager.list_tables(None), self.own)}

    def _is_elsewhere(self, entry: NameEntry) -> bool:
        return entry.state is NameState.HELD and entry.shard != self.own

    async def list_tables(self, database: str | None) -> list[TablePath]:
        """Return the paths of all tables, or of one database's, sorted."""
        paths = sorted(await self.tables())
        if database is None:
            return paths
        databases = await self.databases()
        if database not in databases:
            raise DatabaseNotFoundError(
                f"database '{database}' does not exist{suggestion(database, databases)}"
            )
        return [path for path in paths if path.database == database]

    async def ids_elsewhere(self) -> dict[int, TablePath]:
        """Return the tables of the other shards, by id."""
        entries = await self._run(self._directory.entries)
        return {e.table_id: path for path, e in entries.items() if self._is_elsewhere(e)}

    async def path_elsewhere(self, table_id: int) -> TablePath | None:
        """Return the path of another shard's table by table id; None for an unknown id.

        An id never changes its table, so a cached id is not read again. For an unknown id all names
        are read. Concurrent callers share a read that began after their calls.
        """
        if table_id not in self._ids:
            begun_reads = self._ids_begun
            async with self._reading_ids:
                if self._ids_read <= begun_reads:
                    self._ids_begun += 1
                    self._ids = await self.ids_elsewhere()
                    self._ids_read = self._ids_begun
        return self._ids.get(table_id)

    async def databases(self) -> list[str]:
        """Return the names of all databases, sorted."""
        return sorted(await self._run(self._directory.databases))

    async def endpoints(self) -> list[str]:
        """Return the endpoints of all live owners, cached for some seconds."""
        now_s = time.monotonic()
        if now_s >= self._endpoints_until_s:
            # Workers poll: a worker gets a new endpoint with the next poll.
            self._endpoints_until_s = now_s + _ENDPOINTS_KEPT_S
            states = await self.states()
            owners = [state.owner for state in states if state.owner is not None]
            self._endpoints = [o.endpoint for o in owners if o.is_live and o.endpoint is not None]
        return self._endpoints

    async def states(self) -> list[ShardState]:
        """Return every present and past shard, sorted by name."""
        return await self._run(self._states)

    def _states(self) -> list[ShardState]:
        # Right after the start this shard has not published a record yet.
        records = {self.own: ShardRecord(shard=self.own), **self._directory.records()}
        entries = self._directory.readable_entries().values()
        counts = table_counts([entry for entry in entries if entry.state is NameState.HELD])
        owners = self._owners_of(records)
        return [
            ShardState(
                shard=shard,
                owner=owners[shard],
                load_millicores=record.load_millicores,
                table_count=counts.get(shard, 0),
            )
            for shard, record in sorted(records.items())
        ]

    # -- this shard's record ---------------------------------------------------------------------

    async def publish_record(self) -> None:
        """Publish this shard's record after a change; release names of dropped tables."""
        record = ShardRecord(
            shard=self.own,
            load_millicores=self._load_millicores(),
            table_count=len(self._manager.list_tables(None)),
        )
        await self._manager.release_names()
        if _is_news(self._recorded, record):
            try:
                await self._run(self._directory.record, record)
            except StreamhouseError as error:
                _logger.warning("event=shard_not_recorded why=%r", error.message)
                return
            self._recorded = record

    async def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _is_news(previous: ShardRecord | None, record: ShardRecord) -> bool:
    if previous is None or previous.table_count != record.table_count:
        return True
    return abs(previous.load_millicores - record.load_millicores) >= _LOAD_CHANGE_MILLICORES


class _Load:
    """Processor time of this process since the last call."""

    def __init__(self) -> None:
        self._at_s, self._used_s = time.monotonic(), time.process_time()

    def millicores(self) -> int:
        now_s, used_s = time.monotonic(), time.process_time()
        passed_s, spent_s = now_s - self._at_s, used_s - self._used_s
        if passed_s < _LOAD_INTERVAL_S_MIN:
            # The work of a start does not predict the load after the start.
            return 0
        self._at_s, self._used_s = now_s, used_s
        return round(1000 * spent_s / passed_s)
