"""`streamhouse cdc`: the tables of a database, followed until somebody stops it.

Each start, whatever ended the run before, is the same: read where the tables are, check that the
database still has what comes next, and begin there. So a crash of either side is a start.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamhouse.connector.cdc.source.change_rows import Unchanged
from streamhouse.connector.cdc.source.debezium_engine import (
    DebeziumEngine,
    EngineSettings,
    EventKind,
    SourceEvent,
)
from streamhouse.connector.cdc.source.progress import Progress, ProgressTable
from streamhouse.connector.cdc.source.source_address import SourceAddress
from streamhouse.connector.cdc.source.source_database import SourceDatabase
from streamhouse.connector.cdc.source.target_table import SourceTable, TargetTable
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.storage_service.model.table import TablePath

__all__ = ["Follower", "StreamOptions", "drop_stream"]

_logger = logging.getLogger("streamhouse.cdc")

_SNAPSHOT_STAGE_ROWS: Final = 20_000
_PAUSE_S: Final = (0.5, 30.0)
# A reader that died is noticed by the server when its connection breaks.
_SLOT_FREE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What is followed, and where to: `name` names the slot, the publication and the position."""

    patterns: Sequence[str]
    database: str
    name: str
    bucket_count: int = 1
    keyless: bool = False
    snapshot: bool = False

    @property
    def slot(self) -> str:
        """The replication slot and the publication in the source."""
        return f"streamhouse_{self.name}"


def drop_stream(client: StorageClient, address: SourceAddress, *, database: str, name: str) -> bool:
    """Take away what a stream left in the source, and its position; our tables stay.

    Returns whether the source had its slot.
    """
    slot = StreamOptions(patterns=(), database=database, name=name).slot
    with SourceDatabase(address) as source:
        had_slot = source.drop_slot(slot)
        source.drop_publication(slot)
    ProgressTable(client, database).forget(name)
    return had_slot


class Follower:
    """Keeps tables of ours in step with those of a database."""

    def __init__(
        self,
        client: StorageClient,
        address: SourceAddress,
        options: StreamOptions,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._address = address
        self._options = options
        self._say = say
        self._positions = ProgressTable(client, options.database)
        self._wants_snapshot = options.snapshot
        self._commits = 0

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop` is set. Lost connections are waited for; all else is raised."""
        pause_s = _PAUSE_S[0]
        while not stop.is_set():
            commits = self._commits
            try:
                why = self._run_once(stop)
            except StreamhouseError as error:
                if not error.retriable:
                    raise
                why = str(error)
            if stop.is_set():
                return
            pause_s = _PAUSE_S[0] if self._commits > commits else min(2 * pause_s, _PAUSE_S[1])
            self._say(f"{why}; trying again in {pause_s:g} s")
            stop.wait(pause_s)

    def _run_once(self, stop: threading.Event) -> str:
        with tempfile.TemporaryDirectory(prefix="streamhouse-cdc-rows-") as folder:
            with SourceDatabase(self._address) as source:
                progress, tables = self._prepare(source, stop)
            unchanged = Unchanged(f"__unchanged_{secrets.token_hex(8)}")
            targets = {
                table.full_name: TargetTable(
                    self._client,
                    table,
                    TablePath.parse(progress.tables[table.full_name]),
                    app_id=progress.app_id,
                    unchanged=unchanged,
                    folder=Path(folder),
                )
                for table in tables
            }
            for target in targets.values():
                target.prepare(bucket_count=self._options.bucket_count)
            run = _Run(
                self._positions,
                progress,
                targets,
                slot_position=self._slot_position,
                say=self._say,
            )
            settings = EngineSettings(
                address=self._address,
                slot=self._options.slot,
                publication=self._options.slot,
                tables=tables,
                start_lsn=progress.lsn,
                placeholder=unchanged.placeholder,
            )
            try:
                return DebeziumEngine(settings, run.take).run(stop)
            finally:
                self._commits += run.commits
                run.close()

    def _slot_position(self) -> int:
        """Return where the snapshot was made: nothing was read from the slot since."""
        with SourceDatabase(self._address) as source:
            slot = source.slot(self._options.slot)
        if slot is None:
            raise UnavailableError(f"{self._address}: the replication slot went during a snapshot")
        return slot.confirmed_lsn

    def _prepare(
        self, source: SourceDatabase, stop: threading.Event
    ) -> tuple[Progress, list[SourceTable]]:
        """Return where the stream is and which tables it has, ready to go on or to begin."""
        source.check_can_stream()
        tables = source.tables(self._options.patterns)
        progress = self._positions.load(self._options.name)
        self._wait_for_slot(source, stop)
        if progress is not None and progress.lsn is not None and not self._wants_snapshot:
            return self._go_on(source, progress, tables)
        return self._begin(source, progress, tables)

    def _wait_for_slot(self, source: SourceDatabase, stop: threading.Event) -> None:
        """Wait while a reader that may have died has the slot; raise if it seems to be alive."""
        waited_s = 0.0
        while waited_s < _SLOT_FREE_S and not stop.is_set():
            state = source.slot(self._options.slot)
            if state is None or not state.is_active:
                return
            stop.wait(0.5)
            waited_s += 0.5
        if not stop.is_set():
            raise InvalidRequestError(
                f"{self._address}: another process reads from replication slot"
                f" '{self._options.slot}'; stop it, or choose another --name"
            )

    def _go_on(
        self, source: SourceDatabase, progress: Progress, tables: list[SourceTable]
    ) -> tuple[Progress, list[SourceTable]]:
        assert progress.lsn is not None
        again = "start with --snapshot to read all tables anew"
        system_id = source.system_id()
        if system_id and progress.system_id and system_id != progress.system_id:
            raise InvalidRequestError(
                f"{self._address} is not the server that '{self._options.name}' has followed:"
                f" choose another --name, or {again}"
            )
        slot = source.slot(self._options.slot)
        if slot is None or slot.is_lost:
            raise InvalidRequestError(
                f"{self._address}: replication slot '{self._options.slot}' is gone, and with it"
                f" changes that were not read; {again}"
            )
        if slot.confirmed_lsn > progress.lsn:
            raise InvalidRequestError(
                f"{self._address}: replication slot '{self._options.slot}' was read past what the"
                f" tables of '{self._options.database}' have; {again}"
            )
        known = [table for table in tables if table.full_name in progress.tables]
        for table in tables:
            if table not in known:
                self._say(
                    f"{table.full_name} is new and not followed: --snapshot reads all tables anew,"
                    " with it"
                )
        if not known:
            raise InvalidRequestError(
                f"{self._address}: none of the tables that '{self._options.name}' follows matches"
                f" --tables; {again}"
            )
        return progress, known

    def _begin(
        self, source: SourceDatabase, progress: Progress | None, tables: list[SourceTable]
    ) -> tuple[Progress, list[SourceTable]]:
        slot = source.slot(self._options.slot)
        if progress is None and slot is not None and not self._wants_snapshot:
            raise InvalidRequestError(
                f"{self._address}: replication slot '{self._options.slot}' is there already, and"
                f" database '{self._options.database}' has no position of it; choose another"
                " --name, or take it away with 'streamhouse cdc drop'"
            )
        begun = Progress(
            name=self._options.name,
            generation=secrets.token_hex(8),
            system_id=source.system_id(),
            lsn=None,
            tables=self._targets(tables),
        )
        # A snapshot that was not finished left a slot that is older than the next snapshot.
        source.drop_slot(self._options.slot)
        self._positions.create()
        self._positions.store(begun)
        self._wants_snapshot = False
        self._say(f"reading {len(tables)} tables of {self._address}")
        return begun, tables

    def _targets(self, tables: list[SourceTable]) -> dict[str, str]:
        """Return the path of our table for each of the source's; raise if that is not possible."""
        keyless = [table.full_name for table in tables if not table.primary_key]
        if keyless and not self._options.keyless:
            raise InvalidRequestError(
                f"{self._address}: these tables have no primary key: {', '.join(keyless)}. Give"
                " them one, name the other tables with --tables, or append their changes to log"
                " tables with --keyless append"
            )
        paths: dict[str, str] = {}
        for table in tables:
            path = str(TablePath(self._options.database, table.target_name()))
            if path in paths.values():
                raise InvalidRequestError(
                    f"two tables of {self._address} would become '{path}', one of them"
                    f" {table.full_name}; follow them with two commands"
                )
            paths[table.full_name] = path
        return paths


class _Run:
    """Takes Debezium's events of one run, and commits what is complete."""

    def __init__(
        self,
        positions: ProgressTable,
        progress: Progress,
        targets: dict[str, TargetTable],
        *,
        slot_position: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._positions = positions
        self._slot_position = slot_position
        self._progress = progress
        self._targets = targets
        self._say = say
        self._staged_rows = 0
        self._lsn = progress.lsn
        self._in_transaction = False
        self.commits = 0

    def take(self, events: list[SourceEvent]) -> int | None:
        """Take events; return the place of the last of them that needs not come again."""
        done: int | None = None
        for at, event in enumerate(events):
            if self._progress.lsn is None and not event.is_snapshot:
                self._end_snapshot()
            if event.kind is EventKind.CHANGE:
                self._in_transaction = not event.is_snapshot
                self._change(event)
            elif event.kind is EventKind.END:
                self._in_transaction = False
                self._lsn = event.lsn
                for target in self._targets.values():
                    target.end_transaction(event.lsn)
                done = at
            elif not self._in_transaction and self._progress.lsn is not None:
                done = at
        self._commit()
        return done

    def _change(self, event: SourceEvent) -> None:
        target = self._targets.get(event.table)
        if target is None:
            return
        if event.columns is not None:
            target.follow_schema(event.columns)
        target.add(event.op, event.row or {}, event.text)
        if event.is_snapshot:
            self._staged_rows += 1
            if self._staged_rows % _SNAPSHOT_STAGE_ROWS == 0:
                for each in self._targets.values():
                    if each.changes.has_open:
                        each.stage_snapshot()

    def _end_snapshot(self) -> None:
        rows = sum(target.commit_snapshot() for target in self._targets.values())
        self._lsn = self._slot_position()
        self._progress = replace(self._progress, lsn=self._lsn)
        self._positions.store(self._progress)
        self.commits += 1
        self._say(f"snapshot: {rows:,} rows of {len(self._targets)} tables")

    def _commit(self) -> None:
        if self._lsn is None or self._lsn == self._progress.lsn:
            return
        count = sum(target.commit(self._lsn) for target in self._targets.values())
        self._progress = replace(self._progress, lsn=self._lsn)
        self._positions.store(self._progress)
        self.commits += 1
        if count:
            _logger.info("%d changes, up to %X/%X", count, self._lsn >> 32, self._lsn & 0xFFFFFFFF)

    def close(self) -> None:
        """Drop what was staged and not committed."""
        for target in self._targets.values():
            try:
                target.abort_snapshot()
            except UnavailableError:
                # It times out by itself.
                return
