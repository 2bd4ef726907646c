"""The files at one place of the journal, read from the store without the local disk.

The tree is the newest checkpoint with the later operations. A checkpoint reads files lost or
damaged on its own disk from here; every piece read is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import (
    Manifest,
    decode_manifest,
)
from streamhouse.storage_service.ownership.journal.checkpoints.packs import read_packed
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    JournalObject,
    decode_object,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.operations import Append, Replace
from streamhouse.storage_service.ownership.journal.reader import JournalReader, TrimmedError
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
)
from streamhouse.storage_service.ownership.journal.tree import (
    Held,
    Journalled,
    JournalTree,
    Packed,
    Piece,
)

__all__ = ["StoredTree"]

_MANIFEST_BYTES_MAX: Final = 1 << 30
_FIRST: Final = Place(1, 0)


class StoredTree:
    """The tree before `place`, with the first `applied` operations at `place`.

    `checkpoint` is the place of the newest checkpoint, if any. The journal is read at the first
    `read`.
    """

    def __init__(
        self,
        store: ObjectStore,
        names: ShardNames,
        *,
        service_id: str,
        checkpoint: Place | None,
        place: Place,
        applied: int,
    ) -> None:
        self._store = store
        self._names = names
        self._journal = journal_identity(service_id, names.shard)
        self._checkpoint = checkpoint
        self._end = (place, applied)
        self._tree: JournalTree | None = None
        self._last: JournalObject | None = None

    def read(self, path: str, *, length: int, crc: int) -> Iterator[Buffer]:
        """Yield the bytes of a file with this length and checksum.

        Raises `CorruptDataError` if the store lacks the bytes, and store errors.
        """
        file = self._replayed().get(path)
        if file is None or (file.length, file.crc32c) != (length, crc):
            raise CorruptDataError(f"the journal {self._store.url} does not have {path} either")
        for piece in file.pieces:
            yield self._read(piece)

    def _replayed(self) -> JournalTree:
        if self._tree is None:
            try:
                self._tree = self._replay()
            except (TrimmedError, ObjectNotFoundError) as error:
                raise CorruptDataError(
                    f"the journal {self._store.url} lacks objects after its checkpoint: {error}"
                ) from error
        return self._tree

    def _replay(self) -> JournalTree:
        manifest = self._manifest()
        tree = JournalTree() if manifest is None else manifest.tree
        start = (_FIRST, 0) if manifest is None else (manifest.place, manifest.applied)
        reader = JournalReader(self._store, self._names, start=start[0], journal=self._journal)
        try:
            while (reader.place, 0) < self._end:
                journal_object = reader.next()
                if journal_object is None:
                    raise CorruptDataError(f"{self._names.object(reader.place)} is missing")
                for index, operation in enumerate(journal_object.operations):
                    if start <= (journal_object.place, index) < self._end:
                        place = (journal_object.place.epoch, journal_object.place.seq, index)
                        tree.apply(operation, place=place)
        finally:
            reader.close()
        return tree

    def _manifest(self) -> Manifest | None:
        if self._checkpoint is None:
            return None
        key = self._names.checkpoint(self._checkpoint)
        data = self._store.get(key, bytes_max=_MANIFEST_BYTES_MAX)
        return decode_manifest(bytes(data), where=f"checkpoint {key}")

    def _read(self, piece: Piece) -> Buffer:
        match piece:
            case Packed():
                return read_packed(self._store, self._names, [piece])[0]
            case Held(data):
                return data
            case Journalled(epoch, seq, index):
                operation = self._object(Place(epoch, seq)).operations[index]
                assert isinstance(operation, Append | Replace), operation
                if crc32c(operation.data) == piece.crc32c:
                    return operation.data
        raise CorruptDataError(f"the journal {self._store.url} lacks or changed bytes: {piece!r}")

    def _object(self, place: Place) -> JournalObject:
        if self._last is None or self._last.place != place:
            key = self._names.object(place)
            try:
                data = self._store.get(key, bytes_max=OBJECT_BYTES_MAX)
            except ObjectNotFoundError as error:
                raise CorruptDataError(f"object {key} of the journal is missing") from error
            self._last = decode_object(data, key=key, place=place, journal=self._journal)
        return self._last
