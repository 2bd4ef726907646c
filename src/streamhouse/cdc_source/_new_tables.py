"""Tables added to the source during a stream: read once beside the stream, then followed.

The stream goes on with the old tables, but the source keeps its log from before the read of the new
tables. Then the stream restarts at the position of the new tables, or at its own position if
earlier: changes that tables have already are skipped, and no change is missed or applied twice. A
crash leaves new tables unfollowed, to be read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.cdc_source._change_taker import ChangeTaker
from streamhouse.cdc_source._debezium_engine import EngineSettings
from streamhouse.cdc_source._snapshot import read_snapshot
from streamhouse.cdc_source._source_database import SourceDatabase
from streamhouse.cdc_source._stream_progress import FollowedTable, Progress
from streamhouse.cdc_source._target_table import SourceTable, TargetTable
from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.cdc_source.stream_options import StreamOptions
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.threads import NamedThread

__all__ = ["MakeTarget", "NewTables", "ReadTables", "targets_of"]

_LOOK_S: Final = 5.0
_LOOK_S_MAX: Final = 60.0
_SLOT_FREE_S: Final = 60.0


MakeTarget = Callable[[SourceTable, FollowedTable], TargetTable]


def targets_of(
    tables: Sequence[SourceTable],
    options: StreamOptions,
    *,
    beside: Mapping[str, FollowedTable],
    make_target: MakeTarget,
    say: Callable[[str], None],
) -> dict[str, TargetTable]:
    """Return prepared targets for the tables that can be followed; log the reason for each other
    table.

    A table that cannot be followed does not stop the rest, and the source is not changed for the
    table.
    """
    targets: dict[str, TargetTable] = {}
    paths = dict(beside)
    for table in tables:
        name = table.full_name
        try:
            options.check_new(table)
            path = options.paths([table], beside=paths)
            target = make_target(table, path[name])
            target.prepare(bucket_count=options.bucket_count)
        except StreamhouseError as error:
            if error.retriable:
                raise
            say(f"{name} is not followed: {error}")
        else:
            paths |= path
            targets[name] = target
    return targets


@dataclass(frozen=True, slots=True)
class ReadTables:
    """New tables, with targets equal to the source at `lsn`."""

    lsn: int
    tables: dict[str, FollowedTable]

    def joined(self, progress: Progress) -> Progress:
        """Return the position for a stream with these tables included."""
        assert progress.lsn is not None
        return Progress(
            name=progress.name,
            generation=progress.generation,
            system_id=progress.system_id,
            lsn=min(progress.lsn, self.lsn),
            tables={**progress.tables, **self.tables},
        )


class NewTables:
    """Looks for new tables in a separate thread, inside `with`, until new tables are read.

    `read` then holds the new tables; the follower restarts the stream with the new tables.
    """

    def __init__(
        self,
        address: SourceAddress,
        options: StreamOptions,
        taker: ChangeTaker,
        *,
        make_target: MakeTarget,
        placeholder: str,
        say: Callable[[str], None],
        say_once: Callable[[str], None],
    ) -> None:
        self._address = address
        self._options = options
        self._taker = taker
        self._make_target = make_target
        self._placeholder = placeholder
        self._say = say
        self._say_once = say_once
        # Numbers of tables with unfit values: reading such a table again takes as long.
        self._refused: set[int] = set()
        self._stop = threading.Event()
        self._thread = NamedThread("new tables", self._watch)
        self.read: ReadTables | None = None
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the stream has to start again."""
        return self.read is not None or self.failure is not None

    def __enter__(self) -> NewTables:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        wait_s = _LOOK_S
        while not self._stop.is_set():
            try:
                self.read = self._look()
                wait_s = _LOOK_S
            except StreamhouseError as error:
                # The stream itself says when the source cannot be reached.
                if not error.retriable:
                    self._say_once(str(error))
                wait_s = min(2 * wait_s, _LOOK_S_MAX)
            except BaseException as error:  # noqa: BLE001 - the stream's thread raises it
                self.failure = error
            if self.is_over:
                return
            self._stop.wait(wait_s)

    def _look(self) -> ReadTables | None:
        with SourceDatabase(self._address) as source:
            source_tables = source.tables_now(self._options.patterns, self._options.exclude)
            followed = self._taker.progress.tables
            new: dict[str, SourceTable] = {}
            for table in source_tables:
                ours = followed.get(table.full_name)
                if ours is None or ours.oid != table.oid:
                    if table.oid not in self._refused:
                        new[table.full_name] = table
                    continue
                try:
                    self._options.check_followed(table)
                except StreamhouseError as error:
                    self.failure = error
                    return None
            targets = targets_of(
                list(new.values()),
                self._options,
                beside=followed,
                make_target=self._make_target,
                say=self._say_once,
            )
            if not targets:
                return None
            tables = {name: new[name] for name in targets}
            self._taker.keep_log(ignore=frozenset(targets))
            try:
                return self._read(source, tables, targets)
            except BaseException:
                self._taker.release_log()
                raise

    def _read(
        self,
        source: SourceDatabase,
        tables: dict[str, SourceTable],
        targets: dict[str, TargetTable],
    ) -> ReadTables | None:
        slot = self._options.snapshot_slot
        self._say(f"reading new tables: {', '.join(tables)}")
        source.drop_slot(slot, wait_s=_SLOT_FREE_S)
        source.publish(self._options.slot, list(tables.values()))
        try:
            lsn = read_snapshot(
                self._settings(list(tables.values())), targets, stop=self._stop, say=self._say
            )
        finally:
            self._refused |= {table.oid for name, table in tables.items() if name not in targets}
            source.drop_slot(slot, wait_s=_SLOT_FREE_S)
        if lsn is None:
            return None
        ours = {
            name: FollowedTable(str(t.path), t.source.oid, t.source.column_numbers)
            for name, t in targets.items()
        }
        return ReadTables(lsn, ours)

    def _settings(self, tables: Sequence[SourceTable]) -> EngineSettings:
        return EngineSettings(
            address=self._address,
            slot=self._options.snapshot_slot,
            publication=self._options.slot,
            tables=tables,
            start_lsn=None,
            placeholder=self._placeholder,
        )
