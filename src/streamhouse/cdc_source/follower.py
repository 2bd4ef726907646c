"""`streamhouse cdc`: the tables of a database, followed until a stop.

Each start is the same, after any end of the last run: read the positions of the tables, check that
the database still has the log from there, and begin. A crash of either side is followed by a normal
start.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamhouse.cdc_source._change_taker import ChangeTaker
from streamhouse.cdc_source._debezium_engine import DebeziumEngine, EngineSettings
from streamhouse.cdc_source._new_tables import MakeTarget, NewTables, targets_of
from streamhouse.cdc_source._snapshot import read_snapshot
from streamhouse.cdc_source._source_database import SourceDatabase
from streamhouse.cdc_source._stream_progress import FollowedTable, Progress, ProgressTable
from streamhouse.cdc_source._target_table import SourceTable, TargetTable
from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.cdc_source.stream_options import StreamOptions, check_not_renamed
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
)
from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.model.table import TablePath

__all__ = ["Follower", "drop_stream"]

_PAUSE_S: Final = (0.5, 30.0)
# The server notices a dead reader when the reader's connection breaks.
_SLOT_FREE_S: Final = 60.0
_NO_TABLE: Final = FollowedTable("", 0)


def drop_stream(client: StorageClient, address: SourceAddress, *, database: str, name: str) -> bool:
    """Remove a stream's slot and publication, and its position; the target tables stay.

    Returns whether the source had its slot.
    """
    options = StreamOptions(patterns=(), database=database, name=name)
    with SourceDatabase(address) as source:
        had_slot = source.drop_slot(options.slot)
        source.drop_slot(options.snapshot_slot)
        source.drop_publication(options.slot)
    ProgressTable(client, database).forget(name)
    return had_slot


class Follower:
    """Keeps target tables in step with the tables of a database."""

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
        self._told: set[str] = set()
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
            if not why:
                continue
            pause_s = _PAUSE_S[0] if self._commits > commits else min(2 * pause_s, _PAUSE_S[1])
            self._say(f"{why}; trying again in {pause_s:g} s")
            stop.wait(pause_s)

    def _run_once(self, stop: threading.Event) -> str:
        """Follow until `stop`, Debezium's end or new tables; return the reason, or ""."""
        with tempfile.TemporaryDirectory(prefix="streamhouse-cdc-rows-") as folder:
            with SourceDatabase(self._address) as source:
                progress, tables = self._prepare(source, stop)
            unchanged = UnavailableValue(f"__unchanged_{secrets.token_hex(8)}")

            def make_target(table: SourceTable, ours: FollowedTable) -> TargetTable:
                return TargetTable(
                    self._client,
                    table,
                    TablePath.parse(ours.path),
                    app_id=progress.app_id,
                    unchanged=unchanged,
                    folder=Path(folder),
                )

            if progress.lsn is None:
                return self._begin(progress, tables, make_target, unchanged.placeholder, stop)
            targets = {
                table.full_name: make_target(table, progress.tables[table.full_name])
                for table in tables
            }
            for target in targets.values():
                target.prepare(bucket_count=self._options.bucket_count)
            settings = self._settings(tables, progress.lsn, unchanged.placeholder)
            return self._stream(settings, progress, targets, make_target, stop)

    def _settings(
        self, tables: list[SourceTable], start_lsn: int | None, placeholder: str
    ) -> EngineSettings:
        return EngineSettings(
            address=self._address,
            slot=self._options.slot,
            publication=self._options.slot,
            tables=tables,
            start_lsn=start_lsn,
            placeholder=placeholder,
        )

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    def _begin(
        self,
        progress: Progress,
        tables: list[SourceTable],
        make_target: MakeTarget,
        placeholder: str,
        stop: threading.Event,
    ) -> str:
        """Publish and read the tables that can be followed; leave the rest alone."""
        targets = targets_of(
            tables, self._options, beside={}, make_target=make_target, say=self._say_once
        )
        if not targets:
            raise InvalidRequestError(
                f"{self._address}: none of the tables that --tables names can be followed"
            )
        followed = [table for table in tables if table.full_name in targets]
        begun = replace(
            progress,
            tables={
                name: FollowedTable(str(t.path), t.source.oid, t.source.column_numbers)
                for name, t in targets.items()
            },
        )
        with SourceDatabase(self._address) as source:
            # A snapshot that was not finished left a slot that is older than the next snapshot.
            source.drop_slot(self._options.slot)
            source.drop_publication(self._options.slot)
            source.publish(self._options.slot, followed)
        self._positions.create()
        self._positions.store(begun)
        self._wants_snapshot = False
        self._say(f"reading {len(followed)} tables of {self._address}")
        settings = self._settings(followed, None, placeholder)
        return self._read_all(settings, begun, targets, stop)

    def _read_all(
        self,
        settings: EngineSettings,
        progress: Progress,
        targets: dict[str, TargetTable],
        stop: threading.Event,
    ) -> str:
        lsn = read_snapshot(settings, targets, stop=stop, say=self._say_once)
        if lsn is not None:
            read = {name: ours for name, ours in progress.tables.items() if name in targets}
            if len(read) < len(progress.tables):
                with SourceDatabase(self._address) as source:
                    followed = [target.source for target in targets.values()]
                    source.unpublish_all_but(self._options.slot, followed)
            self._positions.store(replace(progress, lsn=lsn, tables=read))
            self._commits += 1
        return ""

    def _stream(
        self,
        settings: EngineSettings,
        progress: Progress,
        targets: dict[str, TargetTable],
        make_target: MakeTarget,
        stop: threading.Event,
    ) -> str:
        taker = ChangeTaker(self._positions, progress, targets, column_numbers=self._column_numbers)
        new = NewTables(
            self._address,
            self._options,
            taker,
            make_target=make_target,
            placeholder=settings.placeholder,
            say=self._say,
            say_once=self._say_once,
        )
        try:
            with new:
                why = DebeziumEngine(settings, taker.take).run(lambda: stop.is_set() or new.is_over)
        finally:
            self._commits += taker.commits
        if new.failure is not None:
            raise new.failure
        if new.read is not None:
            self._positions.store(new.read.joined(taker.progress))
            self._commits += 1
        return why

    def _column_numbers(self, name: str) -> Mapping[str, int]:
        with SourceDatabase(self._address) as source:
            tables = source.tables_now([name])
        for table in tables:
            self._options.check_followed(table)
            return table.column_numbers
        return {}

    def _prepare(
        self, source: SourceDatabase, stop: threading.Event
    ) -> tuple[Progress, list[SourceTable]]:
        """Return where the stream is and which tables it has, ready to go on or to begin."""
        source.check_can_stream()
        tables = source.tables(self._options.patterns, self._options.exclude)
        progress = self._positions.load(self._options.name)
        self._wait_for_slot(source, stop)
        # The slot remains after a crash of a command during a snapshot of new tables.
        source.drop_slot(self._options.snapshot_slot, wait_s=_SLOT_FREE_S)
        if progress is not None and progress.lsn is not None and not self._wants_snapshot:
            return self._go_on(source, progress, tables)
        return self._begun(source, progress), tables

    def _wait_for_slot(self, source: SourceDatabase, stop: threading.Event) -> None:
        """Wait while a perhaps dead reader has the slot; raise if the reader seems alive."""
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
        followed = [
            table
            for table in tables
            if progress.tables.get(table.full_name, _NO_TABLE).oid == table.oid
        ]
        # A table left out now misses changes: a later return begins with a snapshot.
        noted = {table.full_name: progress.tables[table.full_name] for table in followed}
        for table in followed:
            ours = noted[table.full_name]
            check_not_renamed(table.full_name, ours, table.column_numbers)
            self._options.check_followed(table)
            noted[table.full_name] = replace(ours, columns=table.column_numbers)
        if not followed:
            raise InvalidRequestError(
                f"{self._address}: none of the tables that '{self._options.name}' follows matches"
                f" --tables; {again}"
            )
        going_on = replace(progress, tables=noted)
        if noted.keys() != progress.tables.keys():
            self._positions.store(going_on)
            source.unpublish_all_but(self._options.slot, followed)
        return going_on, followed

    def _begun(self, source: SourceDatabase, progress: Progress | None) -> Progress:
        """Return a stream that has nothing yet; raise if the slot may be another's."""
        slot = source.slot(self._options.slot)
        if progress is None and slot is not None and not self._wants_snapshot:
            raise InvalidRequestError(
                f"{self._address}: replication slot '{self._options.slot}' is there already, and"
                f" database '{self._options.database}' has no position of it; choose another"
                " --name, or take it away with 'streamhouse cdc drop'"
            )
        return Progress(
            name=self._options.name,
            generation=secrets.token_hex(8),
            system_id=source.system_id(),
            lsn=None,
            tables={},
        )
