"""A process's start: the steps for a data directory and its journal.

    prepare      the directory notes the nonce with which the process will take an epoch
    (take)       the epoch is taken: nobody else writes the journal any more
    begin        the directory is made what the journal says, or is to be uploaded
    (open)       the engine opens it, and records what it changes
    (upload)     a directory that never had a journal: its first checkpoint, before anything is
                 acknowledged
    finish       the directory says that it is what the journal says

After an interruption the next start repeats the steps, with the same result.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError, InvalidRequestError
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest
from streamhouse.storage_service.ownership.journal.epochs import open_facts
from streamhouse.storage_service.ownership.journal.names import DEFAULT_SHARD, Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    JournalObject,
    decode_object,
)
from streamhouse.storage_service.ownership.journal.operations import Append
from streamhouse.storage_service.ownership.journal.restore._local_copy import local_files
from streamhouse.storage_service.ownership.journal.restore._local_tree import read_local_tree
from streamhouse.storage_service.ownership.journal.restore._restore import (
    Restored,
    restore_directory,
)
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile, Phase
from streamhouse.storage_service.ownership.journal.restore.journalled_state import (
    JournalledState,
    check_newest_epoch,
    list_checkpoints,
    read_state,
)
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
)
from streamhouse.storage_service.ownership.journal.tree import JournalTree

__all__ = ["Begun", "JournalStart"]

_logger = logging.getLogger(__name__)

_SERVICE_FILE: Final = "service.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A directory ready to be opened. `tree` is the directory's journalled state.

    With `is_upload` the journal has nothing of the directory: record `first_operation` before any
    other operation, and store a checkpoint before acknowledging anything.
    """

    tree: JournalTree
    manifest: Manifest | None = None
    restored: Restored | None = None
    is_upload: bool = False
    first_operation: Append | None = None


class JournalStart:
    """One start of one process. The calls come in the order of the module."""

    def __init__(
        self,
        directory: Path,
        store: ObjectStore,
        names: ShardNames | None = None,
        *,
        place: str = "",
    ) -> None:
        """The directory is locked by this process, and no engine has opened the directory.

        `place` is the directory's place, empty if unknown.
        """
        self._directory = directory
        self._place = place
        self._store = store
        self._names = names or ShardNames(DEFAULT_SHARD)
        self._file = JournalFile.load(directory)
        self._filesystem = LocalFilesystem()

    @property
    def is_known(self) -> bool:
        """Whether the directory had a journal before."""
        return self._file is not None

    def was_last(self, epoch: int) -> bool:
        """Whether processes of this directory opened every epoch since its own, up to `epoch`."""
        return self._file is not None and self._is_own(self._file, epoch + 1)

    def was_last_here(self, epoch: int) -> bool:
        """As `was_last`, and the process of `epoch` is dead: its lock is now this process's.

        A copy of the directory, or its disk in another machine, proves nothing about the process.
        """
        file = self._file
        return (
            file is not None
            and file.was_opened_at(self._opener(epoch), self._place)
            and self._is_own(file, epoch + 1)
        )

    def disown(self) -> None:
        """Note a live owner elsewhere: this directory is a copy, without bytes of its own."""
        if self._file is not None:
            self._save(replace(self._file.of_nobody(), epoch=0))

    def prepare(self, nonce: bytes) -> None:
        """Note the nonce about to open an epoch.

        Raises `InvalidRequestError` if directory and journal do not belong together, and
        `CorruptDataError` for a journal with lost objects: before another owner is fenced.
        """
        file = self._file
        opened = self._opened(1)
        if file is None:
            has_files = next(local_files(self._directory), None) is not None
            if has_files and opened is not None:
                raise InvalidRequestError(
                    f"{self._directory} never had a journal, but the journal {self._store.url} has"
                    " a service: use an empty --data-dir to go on with that one, or another"
                    " --journal to begin one"
                )
            file = JournalFile(
                service_id="",
                shard=self._names.shard,
                epoch=0,
                nonces=(),
                places=(),
                phase=Phase.UPLOADING if has_files else Phase.RESTORING,
            )
        self._check(file, opened)
        check_newest_epoch(self._store, self._names)
        self._save(file.with_nonce(nonce, self._place))

    def begin(self, *, epoch: int, service_id: str) -> Begun:
        """Restore the directory from the journal before the open `epoch`.

        `service_id` is the journal's. Raises `InvalidRequestError` if directory and journal do not
        belong together, `CorruptDataError` for an unreadable journal, store errors, and `OSError`.
        """
        file = self._prepared()
        if file.service_id not in ("", service_id):
            raise self._is_of_another()
        is_own = self._is_own(file, epoch + 1)
        if file.phase == Phase.UPLOADING and not self._has_checkpoint(epoch):
            if not is_own:
                raise CorruptDataError(
                    f"the journal {self._store.url} has begun without the tables of"
                    f" {self._directory}: use another --journal, or another --data-dir"
                )
            return self._upload(file, service_id)
        state = read_state(self._store, self._names, epoch=epoch, service_id=service_id)
        file = replace(file, service_id=service_id)
        if is_own and file.phase != Phase.UPLOADING:
            # The directory stays the last writer's, however often the process ends before serving.
            file = replace(file.with_last_nonce(), epoch=epoch)
        # The disk says `restoring` from the first change on; a repeated begin needs the same phase.
        self._file = replace(file, phase=Phase.RESTORING)
        state, restored = self._restored(state, file, is_own=is_own)
        return Begun(tree=state.tree, manifest=state.manifest, restored=restored)

    def _restored(
        self, newest: JournalledState, file: JournalFile, *, is_own: bool
    ) -> tuple[JournalledState, Restored]:
        """Restore the directory from the newest undamaged checkpoint.

        Without an undamaged one, use the newest without its damaged rows by key: lake and changelog
        have these rows, too. Raises `CorruptDataError` if a file is damaged.
        """
        state: JournalledState | None = newest
        while state is not None:
            try:
                return state, self._restore(state, file, is_own=is_own)
            except CorruptDataError as error:
                if state.manifest is None:
                    break
                _logger.warning(
                    "event=checkpoint_passed_over place=%s why=%r",
                    state.manifest.place,
                    error.message,
                )
                # Some of it may be on the disk by now.
                file = replace(file, phase=Phase.RESTORING)
                state = self._older(state, newest)
        return newest, self._restore(newest, file, is_own=is_own, may_lack_keys=True)

    def _restore(
        self,
        state: JournalledState,
        file: JournalFile,
        *,
        is_own: bool,
        may_lack_keys: bool = False,
    ) -> Restored:
        return restore_directory(
            self._directory,
            state,
            journal_file=file,
            is_own=is_own,
            store=self._store,
            names=self._names,
            may_lack_keys=may_lack_keys,
        )

    def _older(self, state: JournalledState, newest: JournalledState) -> JournalledState | None:
        """Return the same files by the checkpoint before `state`'s; None without one."""
        assert state.manifest is not None
        try:
            older = read_state(
                self._store,
                self._names,
                epoch=state.epoch,
                service_id=state.manifest.service_id,
                before=state.manifest.place,
            )
        except CorruptDataError:
            return None
        return older if older.tree.facts() == newest.tree.facts() else None

    def finish(self, *, epoch: int, service_id: str) -> None:
        """Save the directory's state as restored, and served in `epoch` from now on."""
        file = self._prepared()
        self._save(
            replace(
                file.with_last_nonce(),
                service_id=service_id,
                epoch=epoch,
                phase=Phase.READY,
            )
        )

    def _upload(self, file: JournalFile, service_id: str) -> Begun:
        self._save(replace(file, service_id=service_id))
        tree = read_local_tree(self._directory)
        service_file = tree.get(_SERVICE_FILE)
        if service_file is None:
            raise CorruptDataError(f"{self._directory} has no {_SERVICE_FILE}")
        # A reader of the journal without the checkpoint would fail at this operation first.
        first = Append(_SERVICE_FILE, service_file.length, b"")
        return Begun(tree=tree, is_upload=True, first_operation=first)

    def _has_checkpoint(self, epoch: int) -> bool:
        places = list_checkpoints(self._store, self._names)
        return any(place < Place(epoch, 0) for place in places)

    def _is_own(self, file: JournalFile, epoch: int) -> bool:
        """Whether this directory's processes opened every epoch after its own."""
        later = range(file.epoch + 1, epoch)
        if file.epoch:
            # The process that served last went on in epochs without a gap, perhaps thousands.
            served = file.nonces[0]
            later = later[bisect_left(later, True, key=lambda e: self._opener(e) != served) :]
        return all(self._opener(later_epoch) in file.nonces for later_epoch in later)

    def _opener(self, epoch: int) -> str:
        opened = self._opened(epoch)
        return opened.nonce.hex() if opened else ""

    def _opened(self, epoch: int) -> JournalObject | None:
        place = Place(epoch, 0)
        key = self._names.object(place)
        try:
            data = self._store.get(key, bytes_max=OBJECT_BYTES_MAX)
        except ObjectNotFoundError:
            return None
        return decode_object(data, key=key, place=place)

    def _check(self, file: JournalFile, opened: JournalObject | None) -> None:
        if file.shard != self._names.shard:
            raise InvalidRequestError(
                f"{self._directory} is of shard '{file.shard}', not of '{self._names.shard}'"
            )
        if opened is None:
            if file.epoch or file.service_id:
                raise InvalidRequestError(
                    f"the journal {self._store.url} is empty, but {self._directory} had a"
                    " journal: use the earlier --journal"
                )
            return
        facts = open_facts(opened, key=self._names.object(opened.place))
        is_other = file.service_id not in ("", facts.service_id)
        if is_other or (file.phase == Phase.UPLOADING and opened.nonce.hex() not in file.nonces):
            raise self._is_of_another()

    def _is_of_another(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the journal {self._store.url} belongs to another service than {self._directory}: use"
            " another --data-dir, or another --journal"
        )

    def _prepared(self) -> JournalFile:
        assert self._file is not None, "prepare comes first"
        return self._file

    def _save(self, file: JournalFile) -> JournalFile:
        file.save(self._directory, self._filesystem)
        self._file = file
        return file
