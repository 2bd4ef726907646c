"""Restoring a data directory from the journal: an empty, an old, or a diverged directory.

Every fetched byte is checked by the checksum in the journal or a checkpoint; downloads run in
parallel, with a few packs in memory. `journal.json` says `restoring` from the first change to the
last: after an interruption the next run compares every file by its checksum and gives the same
directory.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.threads import Pool
from streamhouse.storage_service.log.filesystem import Buffer, LocalFilesystem
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import KeyRows
from streamhouse.storage_service.ownership.journal.checkpoints.packs import read_packed
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    decode_object,
)
from streamhouse.storage_service.ownership.journal.operations import Append, Replace
from streamhouse.storage_service.ownership.journal.restore._local_copy import (
    Cut,
    LocalCopy,
    compare,
)
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile, Phase
from streamhouse.storage_service.ownership.journal.restore.journalled_state import JournalledState
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
)
from streamhouse.storage_service.ownership.journal.tree import Held, Journalled, Packed, Piece

__all__ = ["Restored", "restore_directory"]

_logger = logging.getLogger(__name__)

_THREADS: Final = 6
# Neighbours in a pack are fetched together up to this size, over unneeded gaps.
_RUN_BYTES: Final = 8 << 20
_GAP_BYTES: Final = 64 << 10
_STAGED_KEYS: Final = "kv.restored"
_KEYS: Final = "kv"


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore. `cuts` are local logs diverging from the journal."""

    cuts: tuple[Cut, ...]
    files_made: int
    bytes_fetched: int
    keys_given_up: frozenset[str]
    keys_restored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of bytes: a file, from `position` on."""

    path: Path
    position: int


_Want: TypeAlias = tuple[Packed, _Target]


def restore_directory(
    directory: Path,
    state: JournalledState,
    *,
    journal_file: JournalFile,
    is_own: bool,
    store: ObjectStore,
    names: ShardNames,
    may_lack_keys: bool = False,
) -> Restored:
    """Make the directory equal to the journal; `journal_file` is the content of its `journal.json`.

    With `is_own` the directory's process was the journal's last writer. On return `journal.json`
    still says `restoring`: the caller saves the next phase once the epoch is served. With
    `may_lack_keys` damaged rows by key are left out: the engine rebuilds them from the lake or the
    changelog. Raises `CorruptDataError`, store errors, and `OSError`.
    """
    filesystem = LocalFilesystem()
    is_trusted = is_own and journal_file.phase == Phase.READY
    local = compare(directory, state.tree, is_own=is_own, is_trusted=is_trusted)
    replace(journal_file, phase=Phase.RESTORING).save(directory, filesystem)
    for cut in local.cuts:
        _logger.warning(
            "event=log_cut path=%s position=%d reason='another process went on without these rows'",
            cut.path,
            cut.position,
        )
    restorer = _Restorer(directory, store, names, filesystem)
    restorer.give_up_keys(local.keys_given_up)
    restorer.remove(local)
    restorer.make_directories(state.tree.directories)
    restorer.make_files(state, local.kept_lengths, local.longer)
    key_rows = state.manifest.key_rows if state.manifest else ()
    keys = restorer.make_keys(key_rows, state, may_lack=may_lack_keys)
    restorer.sync(state.tree.directories)
    return Restored(
        local.cuts, len(local.kept_lengths), restorer.fetched, local.keys_given_up, keys
    )


class _Restorer:
    """The changes of one restore."""

    def __init__(
        self, directory: Path, store: ObjectStore, names: ShardNames, filesystem: LocalFilesystem
    ) -> None:
        self._directory = directory
        self._store = store
        self._names = names
        self._filesystem = filesystem
        self.fetched = 0
        self._written: set[Path] = set()

    def give_up_keys(self, buckets: Iterable[str]) -> None:
        """Remove rows by key, durably, before truncating the log with the evidence."""
        for bucket in sorted(buckets):
            for name in (_KEYS, _STAGED_KEYS, "kv.dropped"):
                self._filesystem.remove_tree(self._directory / bucket / name)
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.sync_directory(self._directory / bucket)

    def remove(self, local: LocalCopy) -> None:
        """Remove files and directories missing from the journal."""
        for path in local.files_removed:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.remove(self._directory / path)
        for path in local.trees_removed:
            self._filesystem.remove_tree(self._directory / path)

    def make_directories(self, directories: Iterable[str]) -> None:
        """Make all directories."""
        for path in sorted(directories):
            self._filesystem.make_directory(self._directory / path)

    def make_files(
        self, state: JournalledState, kept_lengths: Mapping[str, int], longer: frozenset[str]
    ) -> None:
        """Complete every file of `kept_lengths` after its first, correct bytes.

        Files in `longer` keep their bytes beyond the journal.
        """
        packed: list[_Want] = []
        journalled: dict[tuple[int, int], list[tuple[Journalled, _Target]]] = defaultdict(list)
        for path, right in sorted(kept_lengths.items()):
            file, position, target = state.tree.get(path), 0, self._directory / path
            assert file is not None, "only files of the tree are made"
            if path in longer:
                self._written.add(target)
            else:
                self._begin(target, right)
            for piece in file.pieces:
                if position >= right:
                    match piece:
                        case Packed():
                            packed.append((piece, _Target(target, position)))
                        case Journalled(epoch, seq):
                            journalled[epoch, seq].append((piece, _Target(target, position)))
                        case Held(data):
                            self._write([(_Target(target, position), data)])
                        case _:
                            raise AssertionError("a tree of the store has no local bytes")
                position += piece.length
        self._fetch(packed, journalled)

    def make_keys(
        self, key_rows: Sequence[KeyRows], state: JournalledState, *, may_lack: bool
    ) -> tuple[str, ...]:
        """Put missing rows by key in place; return their buckets.

        With `may_lack` damaged rows are left out.
        """
        missing_rows = [
            rows
            for rows in key_rows
            if rows.bucket in state.tree.directories
            and not (self._directory / rows.bucket / _KEYS).exists()
        ]
        packed = {rows.bucket: self._begin_keys(rows) for rows in missing_rows}
        if may_lack:
            missing_rows = [
                rows for rows in missing_rows if self._has_keys(rows.bucket, packed[rows.bucket])
            ]
        else:
            self._fetch([want for wants in packed.values() for want in wants], {})
        self._sync_files()
        for rows in missing_rows:
            bucket = self._directory / rows.bucket
            self._filesystem.sync_directory(bucket / _STAGED_KEYS)
            self._filesystem.move_directory(bucket / _STAGED_KEYS, bucket / _KEYS)
            self._filesystem.sync_directory(bucket)
        return tuple(rows.bucket for rows in missing_rows)

    def _begin_keys(self, rows: KeyRows) -> list[_Want]:
        staged = self._directory / rows.bucket / _STAGED_KEYS
        self._filesystem.remove_tree(staged)
        self._filesystem.make_directory(staged)
        packed: list[_Want] = []
        for file in rows.files:
            self._begin(staged / file.name, 0)
            position = 0
            for piece in file.pieces:
                packed.append((piece, _Target(staged / file.name, position)))
                position += piece.length
        return packed

    def _has_keys(self, bucket: str, packed: Sequence[_Want]) -> bool:
        """Fetch the rows by key of one bucket; return whether the store has all of them."""
        try:
            self._fetch(packed, {})
        except CorruptDataError as error:
            _logger.warning(
                "event=rows_by_key_not_restored bucket=%s why=%r advice='they are made again of"
                " the lake or the changelog'",
                bucket,
                error.message,
            )
            staged = self._directory / bucket / _STAGED_KEYS
            self._written = {path for path in self._written if path.parent != staged}
            self._filesystem.remove_tree(staged)
            return False
        return True

    def sync(self, directories: Iterable[str]) -> None:
        """Return when all changes are durable."""
        self._sync_files()
        for path in sorted(directories):
            self._filesystem.sync_directory(self._directory / path)
        self._filesystem.sync_directory(self._directory)

    def _begin(self, path: Path, length: int) -> None:
        """Create the file, or truncate the file to its first `length` bytes."""
        file = self._filesystem.open(path) if length else self._filesystem.create(path)
        try:
            file.truncate(length)
        finally:
            file.close()
        self._written.add(path)

    def _sync_files(self) -> None:
        with Pool("journal-sync", _THREADS) as threads:
            list(threads.map(self._sync_file, sorted(self._written)))
        self._written.clear()

    def _sync_file(self, path: Path) -> None:
        file = self._filesystem.open(path)
        try:
            file.sync()
        finally:
            file.close()

    def _fetch(
        self,
        packed: Sequence[_Want],
        journalled: Mapping[tuple[int, int], Sequence[tuple[Journalled, _Target]]],
    ) -> None:
        """Fetch and write bytes, a few runs at a time; raises the first failure."""
        under_way: set[Future[int]] = set()
        with Pool("journal-restore", _THREADS) as threads:
            try:
                for run in _runs(packed):
                    under_way = self._with_room(under_way)
                    under_way.add(threads.submit(self._fetch_run, run))
                for (epoch, seq), fetches in sorted(journalled.items()):
                    under_way = self._with_room(under_way)
                    under_way.add(threads.submit(self._fetch_object, Place(epoch, seq), fetches))
                self.fetched += sum(future.result() for future in under_way)
            except BaseException:
                for future in under_way:
                    future.cancel()
                raise

    def _with_room(self, under_way: set[Future[int]]) -> set[Future[int]]:
        if len(under_way) < _THREADS:
            return under_way
        finished, running = wait(under_way, return_when=FIRST_COMPLETED)
        self.fetched += sum(future.result() for future in finished)
        return set(running)

    def _fetch_run(self, run: Sequence[_Want]) -> int:
        buffers = read_packed(self._store, self._names, [piece for piece, _ in run])
        self._write(zip((target for _, target in run), buffers, strict=True))
        return sum(map(len, buffers))

    def _fetch_object(self, place: Place, fetches: Sequence[tuple[Journalled, _Target]]) -> int:
        key = self._names.object(place)
        try:
            data = self._store.get(key, bytes_max=OBJECT_BYTES_MAX)
        except ObjectNotFoundError as error:
            raise CorruptDataError(f"object {key} of the journal is missing") from error
        operations = decode_object(data, key=key, place=place).operations
        parts: list[tuple[_Target, Buffer]] = []
        for piece, target in fetches:
            operation = operations[piece.index] if piece.index < len(operations) else None
            if not isinstance(operation, Append | Replace) or not _is_of(piece, operation.data):
                raise CorruptDataError(f"object {key} of the journal changed while it was read")
            parts.append((target, operation.data))
        self._write(parts)
        return len(data)

    def _write(self, parts: Iterable[tuple[_Target, Buffer]]) -> None:
        for target, data in parts:
            file = self._filesystem.open(target.path)
            try:
                file.write([data], position=target.position)
            finally:
                file.close()


def _is_of(piece: Piece, data: Buffer) -> bool:
    assert isinstance(piece, Journalled)
    return len(data) == piece.length and crc32c(data) == piece.crc32c


def _runs(fetches: Iterable[_Want]) -> list[list[_Want]]:
    """Group neighbours in a pack as runs, in order."""
    runs: list[list[_Want]] = []
    end = 0
    for want in sorted(fetches, key=lambda want: (want[0].pack, want[0].offset)):
        piece = want[0]
        last = runs[-1] if runs else None
        if (
            last is not None
            and last[0][0].pack == piece.pack
            and piece.offset - end <= _GAP_BYTES
            and piece.offset + piece.length - last[0][0].offset <= _RUN_BYTES
        ):
            last.append(want)
            end = max(end, piece.offset + piece.length)
        else:
            runs.append([want])
            end = piece.offset + piece.length
    return runs
