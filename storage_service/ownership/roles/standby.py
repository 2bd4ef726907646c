"""A standby: a process following the owner of its shard, ready to take over.

The standby applies new objects of the journal to its own directory, and keeps the rows by key warm.
Meanwhile `journal.json` says `restoring`: after a crash every file is compared with the journal.
After a trimmed or inconsistent object the standby restores the directory from the newest
checkpoint. Blocking; one thread at a time.

The tables with warm rows are in `WarmTables`, those with open logs in `LogTables`: other threads
read there, until the standby takes the shard or begins anew.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import CorruptDataError, InvalidRequestError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.followed.followed_logs import FollowedLogs, LogTables
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.engine.keys.warm_tables import WarmTables
from streamhouse.storage_service.engine.transactions.stored_decisions import is_committing
from streamhouse.storage_service.ownership.journal._followed_directory import FollowedDirectory
from streamhouse.storage_service.ownership.journal.epochs import SealReason, read_open
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import (
    JournalObject,
    ObjectKind,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.reader import JournalReader, TrimmedError
from streamhouse.storage_service.ownership.journal.restore._followed_tree import FollowedTree
from streamhouse.storage_service.ownership.journal.restore._start import Begun
from streamhouse.storage_service.ownership.journal.restore.journalled_state import newest_manifest
from streamhouse.storage_service.ownership.journal.steps import run_on
from streamhouse.storage_service.ownership.roles._owned_shard import OwnedShard
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s
from streamhouse.storage_service.ownership.roles.role import Lag
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart

__all__ = ["Standby", "TakenOver"]

_logger = logging.getLogger(__name__)

# Objects applied in one call; the caller has other duties in between.
_OBJECTS_AT_ONCE: Final = 50
_SYNC_EVERY_S: Final = 1.0
_GIVE_BACK_S: Final = 5.0
# The lease must have changed this often before the owner of this very directory counts as alive:
# a dead owner's renewal may still have been in flight.
_SIGNS_OF_LIFE: Final = 3
_BEGIN_ANEW: Final = Backoff(first_s=0.1, most_s=30.0)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A taken shard, and its directory, equal to the journal."""

    shard: OwnedShard
    begun: Begun
    warm: WarmRows | None = None


@dataclass(slots=True)
class _Followed:
    """One directory following the journal from one place on."""

    tree: FollowedTree
    directory: FollowedDirectory
    warm: WarmRows
    logs: FollowedLogs
    reader: JournalReader
    sealed_for: str | None = None
    """The reason in the last seal read, until the next epoch opens."""

    def apply(self, journal_object: JournalObject) -> None:
        """Apply one object of the journal."""
        self.sealed_for = None
        if journal_object.kind is ObjectKind.SEAL:
            self.sealed_for = str(journal_object.facts.get("reason"))
        changed = self.directory.apply(journal_object.operations)
        self.tree.apply(journal_object)
        self.warm.follow(changed)
        self.logs.follow(changed)

    def close(self) -> None:
        """Close directory, rows and reader."""
        self.directory.close()
        self.logs.close()
        self.warm.close()
        self.reader.close()


@dataclass(slots=True)
class Standby:
    """See the module."""

    config: ServiceConfig
    directory: DataDirectory
    start: ShardStart
    tables: WarmTables = field(default_factory=WarmTables)
    logs: LogTables = field(default_factory=LogTables)
    _followed: _Followed | None = field(default=None, init=False)
    _shard: OwnedShard | None = field(default=None, init=False)
    _own_epoch: int = field(default=0, init=False)
    """This directory's last epoch, if the epoch was the newest when last checked."""
    _is_owner_gone: bool = field(default=False, init=False)
    """Whether the process of this epoch is dead: the lock is now this process's."""
    _signs_of_life: list[object] = field(default_factory=list, init=False)
    """The different leases seen meanwhile."""
    _is_caught_up: bool = field(default=False, init=False)
    _failures: int = field(default=0, init=False)
    _begins_s: float = field(default=float("-inf"), init=False)
    _caught_up_s: float = field(default_factory=boot_clock_s, init=False)
    _synced_s: float = field(default_factory=boot_clock_s, init=False)

    @property
    def may_take_now(self) -> bool:
        """Whether the owner stopped, or is dead because this process has its lock.

        Otherwise the owner's lease has to expire.
        """
        is_own = 0 < self._own_epoch == self.start.newest_epoch
        return (
            (is_own and self._is_owner_gone)
            or self._ended_epoch is not None
            or self.start.has_run_out
        )

    @property
    def _ended_epoch(self) -> int | None:
        """The last epoch read, if sealed by its owner or a successor."""
        followed = self._followed
        if followed is None or followed.sealed_for in (None, SealReason.ROLLED):
            return None
        return followed.reader.place.epoch - 1

    def follow(self) -> bool:
        """Apply new objects, up to a limit; return whether more objects may be ready.

        Raises store errors and `OSError`.
        """
        try:
            is_early = boot_clock_s() < self._begins_s
            if self._followed is None and (is_early or not self._begin()):
                return False
            return self._follow()
        except (CorruptDataError, TrimmedError) as error:
            self._give_up(error)
            return False

    @property
    def caught_up_lag(self) -> Lag | None:
        """The lag, if all objects seen by the last `follow` are applied."""
        is_caught_up = self._followed is not None and self._is_caught_up
        return Lag(since_s=self._caught_up_s) if is_caught_up else None

    def lag(self) -> Lag:
        """Return the lag behind the journal; asks the store."""
        followed = self._followed
        if followed is None:
            # Nothing is applied yet, not even the object that opens the epoch.
            return Lag(objects=1, since_s=self._caught_up_s)
        place, names = followed.reader.place, self.start.names
        last_key = names.object(Place(place.epoch, place.seq - 1)) if place.seq else ""
        behind = self.start.store.list_objects(names.epoch(place.epoch), start_after=last_key)
        return Lag(objects=len(behind), since_s=self._caught_up_s)

    def take(self) -> TakenOver:
        """Take the shard, or go on after a failure of the store.

        Raises `TakenByOtherError` if another process was faster, and store errors.
        """
        if self._shard is None:
            if self._followed is None:
                self.start.prepare()
            # The newest epoch seen may be a later epoch, with a live owner.
            ended = self._ended_epoch
            self._shard = self.start.take(after=self.start.newest_epoch if ended is None else ended)
        shard = self._shard
        followed = self._followed
        if followed is not None:
            try:
                for journal_object in followed.reader.read_to(shard.epoch):
                    followed.apply(journal_object)
                followed.directory.sync()
                followed.directory.check(followed.tree.tree)
                begun = self._begun(followed, shard)
                followed.directory.close()
                followed.reader.close()
                # The next owner of rows and logs changes them before changes may be seen.
                followed.logs.close()
                followed.warm.end_lookups()
            except (CorruptDataError, TrimmedError) as error:
                self._give_up(error)
            else:
                self._followed = self._shard = None
                return TakenOver(shard, begun, followed.warm)
        begun = self.start.begin(epoch=shard.epoch, service_id=shard.service_id)
        self._shard = None
        return TakenOver(shard, begun)

    def _begun(self, followed: _Followed, shard: OwnedShard) -> Begun:
        """Return the directory's journalled state, with bytes in the newest checkpoint's packs."""
        manifest = newest_manifest(
            self.start.reading, self.start.names, epoch=shard.epoch, service_id=shard.service_id
        )
        return Begun(tree=followed.tree.on(manifest, self.directory.path), manifest=manifest)

    def close(self) -> None:
        """Stop following; a shard taken but not served is released."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close(timeout_s=_GIVE_BACK_S)
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.directory.sync()
            followed.close()

    def _give_up(self, why: Exception) -> None:
        """Start again after a pause, because the same error may return."""
        self._failures += 1
        self._begins_s = boot_clock_s() + _BEGIN_ANEW.jittered_after(self._failures)
        _logger.warning("event=standby_begins_anew failures=%d why=%r", self._failures, str(why))
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.close()

    def _begin(self) -> bool:
        """Restore the directory as of the start of the newest epoch; False without an epoch.

        Also False if the newest epoch was this directory's own: no other process has gone on since,
        and bytes on its disk beyond the journal have to stay. If the owner is alive, the directory
        is a copy and is restored.
        """
        epoch = self.start.newest_epoch
        if epoch == 0:
            return False
        if self.start.was_last:
            self._own_epoch = epoch
            self._is_owner_gone = self.start.was_last_here
            if self._is_owner_gone or not self._is_owner_alive():
                return False
            _logger.warning("event=standby_on_a_copy path='%s'", self.directory.path)
            self.start.disown()
        self.start.prepare()
        # Every epoch's open object has the service's id.
        service_id = run_on(self.start.store, read_open(self.start.names, epoch)).service_id
        begun = self.start.begin(epoch=epoch, service_id=service_id)
        if begun.is_upload:
            raise InvalidRequestError(
                f"{self.directory.path} has tables that the journal does not have: start once"
                " without --standby, or give an empty --data-dir"
            )
        warm = WarmRows(
            self.directory, self.config, tables=self.tables, is_committing=is_committing
        )
        warm.open_all()
        logs = FollowedLogs(self.directory, rows=warm, tables=self.logs)

        def leave(path: str) -> None:
            logs.leave(path)
            warm.leave(path)

        self._followed = _Followed(
            tree=FollowedTree(begun.tree, start=Place(epoch, 0), manifest=begun.manifest),
            directory=FollowedDirectory(self.directory.path, leave=leave),
            warm=warm,
            logs=logs,
            reader=JournalReader(
                self.start.reading,
                self.start.names,
                start=Place(epoch, 0),
                journal=journal_identity(service_id, self.start.names.shard),
            ),
        )
        return True

    def _is_owner_alive(self) -> bool:
        sign = self.start.sign_of_life
        if sign not in self._signs_of_life:
            self._signs_of_life.append(sign)
        return len(self._signs_of_life) > _SIGNS_OF_LIFE

    def _follow(self) -> bool:
        followed = self._followed
        assert followed is not None
        for _ in range(_OBJECTS_AT_ONCE):
            journal_object = followed.reader.next()
            self._is_caught_up = journal_object is None
            if journal_object is None:
                self._caught_up_s = boot_clock_s()
                self._failures = 0
                break
            followed.apply(journal_object)
        followed.logs.open_asked()
        if boot_clock_s() - self._synced_s > _SYNC_EVERY_S:
            followed.directory.sync()
            self._synced_s = boot_clock_s()
        return journal_object is not None or followed.warm.load_some()
