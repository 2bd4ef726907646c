"""Taking a checkpoint: every file at one place of the journal, while the service goes on.

Order: link rows by key aside; choose the place and copy the tree; read files and upload bytes
missing from packs; wait for the journal; write the manifest. A failed attempt leaves at most packs
without a manifest, and `_trim.py` deletes them.

Promises:
- a manifest describes a file exactly as journalled: every byte read is compared with the tree's
  checksum, so a damaged disk never spreads to the store
- a file lost or changed on the disk is read from the store instead; the damage is logged, and does
  not block the checkpoint
- a file replaced or removed after the place is left out: a later operation describes the file
- bytes in a sound pack are neither read nor uploaded again
- memory is bounded by a few packs, for any file size
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.durable_mark import MARK_NAME
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal._file_checksum import check_next
from streamhouse.storage_service.ownership.journal.checkpoints._recorder import (
    TreeAtPlace,
    TreeRecorder,
)
from streamhouse.storage_service.ownership.journal.checkpoints._stored_tree import StoredTree
from streamhouse.storage_service.ownership.journal.checkpoints.key_files import (
    KeyCopy,
    KeyPacker,
    SeenCopy,
)
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import (
    KeyRows,
    Manifest,
    encode_manifest,
)
from streamhouse.storage_service.ownership.journal.checkpoints.packs import (
    PACK_BYTES_MAX,
    PackWriter,
    pack_name,
    read_packed,
)
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectExistsError,
    ObjectStore,
)
from streamhouse.storage_service.ownership.journal.tree import (
    FileAtPlace,
    Held,
    JournalTree,
    Packed,
    TreeFile,
)

__all__ = [
    "STAGING",
    "CheckpointTaker",
]

_logger = logging.getLogger(__name__)

STAGING: Final = "checkpoint.staged"
"""The directory, within the data directory, for links to rows by key."""

# A rename may follow its journal operation late, while the disk stalls.
_LOOKS: Final = 100
_LOOK_EVERY_S: Final = 0.1
# A pack is rewritten when a smaller share is still needed, or with too many small packs.
_NEEDED_SHARE: Final = 0.5
_SMALL_PACK_BYTES: Final = 4 << 20
_SMALL_PACKS_MAX: Final = 32


@dataclass(slots=True, kw_only=True)
class CheckpointTaker:
    """Takes the checkpoints of one owner, one at a time, on any thread.

    `copy_keys` copies all rows by key below a directory, except buckets still at the offset in the
    mapping.
    """

    directory: Path
    store: ObjectStore
    names: ShardNames
    service_id: str
    epoch: int
    recorded: TreeRecorder
    copy_keys: Callable[[Path, Mapping[str, int]], Sequence[KeyCopy]]
    packs: dict[str, int] = field(default_factory=dict)
    """The packs of the previous manifest, and their lengths."""
    keys: KeyPacker = field(default_factory=KeyPacker)
    previous_place: Place | None = None
    """The place of the checkpoint with these `packs`."""
    damaged: dict[str, int] = field(default_factory=dict)
    """Files damaged on the local disk: path and version."""
    sleep: Callable[[float], None] = time.sleep
    pack_bytes_max: int = PACK_BYTES_MAX
    _next_number: int = 0
    _last_place: Place | None = None

    def take(self) -> Manifest | None:
        """Take a checkpoint; None without changes since the last.

        Raises store errors or `StorageFailedError`; no manifest is written then.
        """
        staging = self.directory / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            return self._take(staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _take(self, staging: Path) -> Manifest | None:
        copies = self.keys.look(self.copy_keys(staging, self.keys.applied_offsets))
        at = self.recorded.at_place()
        self.recorded.wait_stored(at.position)
        place, applied = self.recorded.place_of(at.position)
        if place == self._last_place:
            return None
        self._forget_damage(at.files)
        stored = StoredTree(
            self.store,
            self.names,
            service_id=self.service_id,
            checkpoint=self.previous_place,
            place=place,
            applied=applied,
        )
        next_pack = pack_name(self.epoch, self._next_number)
        sound = self._sound_packs(at.files, copies)
        writer = PackWriter(
            self.store,
            self.names,
            epoch=self.epoch,
            number=self._next_number,
            pack_bytes_max=self.pack_bytes_max,
        )
        try:
            with writer:
                files = [(file, self._pack_file(file, writer, sound, stored)) for file in at.files]
                keys = [self.keys.pack(copy, writer, sound) for copy in copies]
                writer.finish()
        except BaseException:
            # Further attempts may fail, too, and trimming runs only after a success.
            writer.take_back()
            raise
        finally:
            # Packs of an attempt that failed are never written again.
            self._next_number = writer.next_number + 1
        lengths = {**self.packs, **writer.lengths}
        # All bytes read were recorded before now, and rows by key do not exceed this position.
        until = self.recorded.recorded_position
        self.recorded.wait_stored(until)
        manifest = self._manifest(
            place, applied, self.recorded.place_of(until)[0], next_pack, at, files, keys, lengths
        )
        self._store_manifest(manifest)
        self.recorded.packed((file, pieces) for file, pieces in files if pieces is not None)
        self.packs = dict(manifest.packs)
        self.keys.packed(manifest.key_rows)
        self._last_place = self.previous_place = place
        return manifest

    def _manifest(
        self,
        place: Place,
        applied: int,
        stored_until: Place,
        next_pack: str,
        at: TreeAtPlace,
        files: Sequence[tuple[FileAtPlace, Sequence[Packed] | None]],
        keys: Sequence[KeyRows],
        lengths: Mapping[str, int],
    ) -> Manifest:
        tree = JournalTree()
        for directory in at.directories:
            tree.add_directory(directory)
        for file, pieces in files:
            if pieces is None:
                tree.add_file(file.left_out())
            else:
                tree.add_file(TreeFile(file.path, file.length, file.crc32c, list(pieces)))
        named = {piece.pack for _, pieces in files for piece in pieces or ()}
        named |= {piece.pack for rows in keys for key in rows.files for piece in key.pieces}
        return Manifest(
            service_id=self.service_id,
            shard=self.names.shard,
            place=place,
            applied=applied,
            stored_until=stored_until,
            next_pack=next_pack,
            tree=tree,
            packs={name: lengths[name] for name in named},
            key_rows=tuple(keys),
        )

    def _store_manifest(self, manifest: Manifest) -> None:
        key = self.names.checkpoint(manifest.place)
        data = encode_manifest(manifest)
        try:
            self.store.create(key, [data])
        except ObjectExistsError:
            # An answer was lost: only this owner writes manifests of this epoch.
            if bytes(self.store.get(key, bytes_max=len(data))) != data:
                raise

    def _sound_packs(
        self, files: Sequence[FileAtPlace], copies: Sequence[SeenCopy]
    ) -> frozenset[str]:
        """Return the packs to keep: a large share is needed, and few packs are small."""
        needed: Counter[str] = Counter()
        for at in files:
            for piece in at.pieces:
                if isinstance(piece, Packed):
                    needed[piece.pack] += piece.length
        for copy in copies:
            for piece in copy.packed_pieces:
                needed[piece.pack] += piece.length
        sound = {
            name
            for name, length in self.packs.items()
            if needed[name] >= length * _NEEDED_SHARE and needed[name]
        }
        small = {name for name in sound if self.packs[name] < _SMALL_PACK_BYTES}
        if len(small) > _SMALL_PACKS_MAX:
            sound -= small
        # Unchanged rows were not copied, so their packs must stay.
        unchanged = (rows for copy in copies if (rows := copy.unchanged))
        unchanged_packs = {
            piece.pack for rows in unchanged for file in rows.files for piece in file.pieces
        }
        return frozenset(sound | unchanged_packs)

    def _pack_file(
        self, at: FileAtPlace, writer: PackWriter, sound: frozenset[str], stored: StoredTree
    ) -> list[Packed] | None:
        """Return the pieces of a file at its place, or None if the file was replaced since."""
        packed = [piece for piece in at.pieces if isinstance(piece, Packed)]
        if at.packed_length == at.length and all(piece.pack in sound for piece in packed):
            return packed
        looks = 1 if self.damaged.get(at.path) == at.version else _LOOKS
        for look in range(looks):
            if look:
                self.sleep(_LOOK_EVERY_S)
            if not at.is_there:
                return None
            try:
                if look and not self._is_right(at):
                    # Reading for a pack uploads the bytes, right or wrong: once is enough.
                    continue
                pieces = self._read_file(at, packed, writer, sound)
            except (FileNotFoundError, IsADirectoryError):
                # The file was moved or removed, or is just being renamed.
                continue
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                break
            if pieces is not None:
                return pieces
        if not at.is_there:
            return None
        return self._pack_stored(at, writer, stored)

    def _pack_stored(self, at: FileAtPlace, writer: PackWriter, stored: StoredTree) -> list[Packed]:
        """Return the pieces of a file damaged on the disk, from the store."""
        damaged = f"{self.directory / at.file.path} is not what was written to it"
        if self.damaged.get(at.path) != at.version:
            self.damaged[at.path] = at.version
            _logger.error(
                "event=damaged_file why='%s' advice='the journal has it: look at the disk, and"
                " start again on an empty directory'",
                damaged,
            )
        try:
            stored_bytes = _Stream(stored.read(at.path, length=at.length, crc=at.crc32c))
            added = writer.add_from(stored_bytes, at.length)
            if (added.length, added.crc32c) != (at.length, at.crc32c):
                raise CorruptDataError("the store has not all pieces of the file")
        except CorruptDataError as error:
            raise StorageFailedError(
                f"{damaged}: no checkpoint can be taken, as the store cannot give it"
                f" ({error.message}); look at the disk and run `streamhouse check`"
            ) from error
        return added.pieces

    def _forget_damage(self, files: Sequence[FileAtPlace]) -> None:
        versions = {at.path: at.version for at in files if at.path in self.damaged}
        self.damaged = {p: v for p, v in self.damaged.items() if versions.get(p) == v}

    def _is_right(self, at: FileAtPlace) -> bool:
        """Whether the file's bytes are the journalled bytes."""
        with (self.directory / at.file.path).open("rb", buffering=0) as file:
            return check_next(file, at.length) == (at.crc32c, at.length)

    def _read_file(
        self,
        at: FileAtPlace,
        packed: Sequence[Packed],
        writer: PackWriter,
        sound: frozenset[str],
    ) -> list[Packed] | None:
        """Return the pieces of a file, None if its bytes changed."""
        held_data = [piece.data for piece in at.pieces if isinstance(piece, Held)]
        if held_data:
            return [writer.add(data) for data in held_data if data]
        if at.path.endswith(f"/{MARK_NAME}") and packed:
            # The mark is overwritten in place: the local file may be ahead of the journal.
            return [
                writer.add(data)
                for piece in packed
                for data in read_packed(self.store, self.names, [piece])
            ]
        pieces: list[Packed] = []
        position = 0
        with (self.directory / at.file.path).open("rb", buffering=0) as file:
            for piece in packed:
                if piece.pack in sound:
                    pieces.append(piece)
                else:
                    file.seek(position)
                    added = writer.add_from(file, piece.length)
                    if (added.length, added.crc32c) != (piece.length, piece.crc32c):
                        return None
                    pieces.extend(added.pieces)
                position += piece.length
            file.seek(position)
            tail = writer.add_from(file, at.length - position, crc=at.packed_crc32c)
        is_same = (position + tail.length, tail.crc32c) == (at.length, at.crc32c)
        return [*pieces, *tail.pieces] if is_same else None


class _Stream:
    """A file-like reader of pieces."""

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces
        self._buffer = memoryview(b"")

    def readinto(self, room: memoryview, /) -> int:
        """Fill a part of the room with the next bytes; return their number, 0 at the end."""
        while not len(self._buffer):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._buffer = memoryview(piece)
        data, self._buffer = self._buffer[: len(room)], self._buffer[len(room) :]
        room[: len(data)] = data
        return len(data)
