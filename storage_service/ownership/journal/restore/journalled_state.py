"""A data directory's state in the journal: the newest usable checkpoint and the later operations.

A damaged checkpoint, or one with a missing pack, is skipped with a warning, and the previous
checkpoint is used: the journal reaches back to both. Without checkpoints the journal must begin
with an empty directory. Anything else is damage and refused: a part of the rows never counts as all
of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.checkpoints._trim import list_all
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import (
    Manifest,
    decode_manifest,
)
from streamhouse.storage_service.ownership.journal.epochs import SealReason, newest_epoch
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    SEAL_BYTES_MAX,
    JournalObject,
    ObjectKind,
    decode_object,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.reader import JournalReader, TrimmedError
from streamhouse.storage_service.ownership.journal.steps import run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    ObjectTooLargeError,
)
from streamhouse.storage_service.ownership.journal.tree import JournalTree

__all__ = [
    "READ_AHEAD",
    "JournalledState",
    "Replay",
    "check_manifest",
    "check_newest_epoch",
    "list_checkpoints",
    "load_manifest",
    "newest_manifest",
    "pack_lengths",
    "read_state",
]

_logger = logging.getLogger(__name__)

_MANIFEST_BYTES_MAX: Final = 1 << 30
READ_AHEAD: Final = 8
"""The number of objects fetched ahead, to restore or check a journal."""
_FIRST: Final = Place(1, 0)


@dataclass(frozen=True, slots=True)
class JournalledState:
    """The tree at the end of the journal, and its checkpoint, if any.

    `epoch` is the epoch being opened: the tree includes everything before.
    """

    tree: JournalTree
    manifest: Manifest | None
    epoch: int


class Replay:
    """`tree` is a checkpoint's tree, or an empty one, with the later operations.

    `start` is the first place read, `end` the place after the last object applied.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        self.tree = manifest.tree.copy() if manifest else JournalTree()
        self.start = self.end = manifest.place if manifest else _FIRST
        self._applied = manifest.applied if manifest else 0

    def apply(self, journal_object: JournalObject) -> None:
        """Apply the next object; raises `CorruptDataError`."""
        # A seal stands where the next operations would have been.
        self.end = (
            journal_object.place
            if journal_object.kind is ObjectKind.SEAL
            else journal_object.place.following
        )
        applied = self._applied if journal_object.place == self.start else 0
        if applied > len(journal_object.operations):
            raise CorruptDataError(f"object {self.start} has not the operations of its checkpoint")
        for index, operation in enumerate(journal_object.operations):
            if index >= applied:
                self.tree.apply(
                    operation, place=(journal_object.place.epoch, journal_object.place.seq, index)
                )


def list_checkpoints(store: ObjectStore, names: ShardNames) -> list[Place]:
    """Return the places of all manifests, in order."""
    places = (names.place_of_checkpoint(entry.key) for entry in list_all(store, names.checkpoints))
    return sorted(place for place in places if place is not None)


def check_newest_epoch(store: ObjectStore, names: ShardNames) -> None:
    """Raise `CorruptDataError` if an epoch sealed by its owner has lost objects.

    A taker seals an epoch at its first gap, because objects behind a gap were never acknowledged.
    An owner seals after storing everything, so a gap before an owner's seal is a loss.
    """
    newest = run_on(store, newest_epoch(names))
    if not newest:
        return
    entries = list(list_all(store, names.epoch(newest)))
    places = [place for entry in entries if (place := names.place_of_object(entry.key))]
    if not places or entries[-1].size_bytes > SEAL_BYTES_MAX or len(places) == places[-1].seq + 1:
        return
    key = names.object(places[-1])
    last = decode_object(store.get(key, bytes_max=SEAL_BYTES_MAX), key=key, place=places[-1])
    is_owners = last.facts.get("reason") in (SealReason.STOPPED, SealReason.ROLLED)
    if last.kind is ObjectKind.SEAL and is_owners:
        seqs = {place.seq for place in places}
        gone = next(seq for seq in range(places[-1].seq) if seq not in seqs)
        raise CorruptDataError(
            f"object {names.object(Place(newest, gone))} of the journal {store.url} is missing:"
            " the object was stored before its epoch was sealed; put the object back"
        )


def load_manifest(store: ObjectStore, names: ShardNames, place: Place) -> Manifest:
    """Return the manifest of a place; raises `CorruptDataError` for a damaged or foreign one."""
    key = names.checkpoint(place)
    try:
        data = store.get(key, bytes_max=_MANIFEST_BYTES_MAX)
    except (ObjectNotFoundError, ObjectTooLargeError) as error:
        raise CorruptDataError(f"checkpoint {key} is missing or damaged: {error}") from error
    manifest = decode_manifest(bytes(data), where=f"checkpoint {key}")
    if (manifest.place, manifest.shard) != (place, names.shard):
        raise CorruptDataError(f"checkpoint {key} names another place or shard")
    return manifest


def newest_manifest(
    store: ObjectStore, names: ShardNames, *, epoch: int, service_id: str
) -> Manifest | None:
    """Return the newest checkpoint before the open `epoch` with all its packs."""
    places = [place for place in list_checkpoints(store, names) if place < Place(epoch, 0)]
    packs = pack_lengths(store, names) if places else {}
    for place in reversed(places):
        try:
            manifest = load_manifest(store, names, place)
            check_manifest(manifest, packs, service_id=service_id)
        except CorruptDataError as error:
            _logger.warning("event=checkpoint_passed_over place=%s why=%r", place, error.message)
        else:
            return manifest
    return None


def read_state(
    store: ObjectStore,
    names: ShardNames,
    *,
    epoch: int,
    service_id: str,
    before: Place | None = None,
) -> JournalledState:
    """Return the journalled state at the end of the epoch before the open `epoch`.

    With `before` only checkpoints before this place count. Raises `CorruptDataError` naming the
    missing or damaged objects.
    """
    why: list[str] = []
    places = [place for place in list_checkpoints(store, names) if place < Place(epoch, 0)]
    packs = pack_lengths(store, names) if places else {}
    # The journal was stored up to there, even if the checkpoint itself is unreadable now.
    end_min = max(places, default=_FIRST)
    for place in reversed(places):
        if before is not None and place >= before:
            continue
        try:
            manifest = load_manifest(store, names, place)
            check_manifest(manifest, packs, service_id=service_id)
            end_min = max(end_min, manifest.stored_until)
            replayed = _replay(store, names, manifest, epoch=epoch, service_id=service_id)
        except (CorruptDataError, TrimmedError) as error:
            why.append(str(error))
            _logger.warning("event=checkpoint_passed_over place=%s why=%r", place, str(error))
        else:
            _check_end(replayed, end_min, store)
            return JournalledState(replayed.tree, manifest, epoch)
    try:
        replayed = _replay(store, names, None, epoch=epoch, service_id=service_id)
    except (CorruptDataError, TrimmedError) as error:
        why.append(str(error))
        raise CorruptDataError(
            f"the journal {store.url} cannot restore the data directory: {'; '.join(why)}"
        ) from error
    _check_end(replayed, end_min, store)
    return JournalledState(replayed.tree, None, epoch)


def pack_lengths(store: ObjectStore, names: ShardNames) -> dict[str, int]:
    """Return the length of each pack in the store, by name."""
    entries = list_all(store, names.packs)
    packs = ((names.name_of_pack(entry.key), entry.size_bytes) for entry in entries)
    return {name: size_bytes for name, size_bytes in packs if name is not None}


def check_manifest(manifest: Manifest, packs: Mapping[str, int], *, service_id: str) -> None:
    """Raise `CorruptDataError` for another service's manifest, or a missing pack."""
    if manifest.service_id != service_id:
        raise CorruptDataError(
            f"checkpoint {manifest.place} belongs to service {manifest.service_id}, not"
            f" {service_id}"
        )
    for name, length in manifest.packs.items():
        stored_length = packs.get(name)
        if stored_length != length:
            raise CorruptDataError(
                f"checkpoint {manifest.place} names pack {name} of {length} bytes, but it is"
                f" {'missing' if stored_length is None else f'{stored_length} bytes long'}"
            )


def _replay(
    store: ObjectStore,
    names: ShardNames,
    manifest: Manifest | None,
    *,
    epoch: int,
    service_id: str,
) -> Replay:
    """Return the tree of a checkpoint, or an empty tree, with all operations before `epoch`."""
    replay = Replay(manifest)
    journal = journal_identity(service_id, names.shard)
    reader = JournalReader(store, names, start=replay.start, journal=journal, ahead=READ_AHEAD)
    try:
        for journal_object in reader.read_to(epoch):
            replay.apply(journal_object)
    finally:
        reader.close()
    replay.tree.check_whole()
    return replay


def _check_end(replayed: Replay, end_min: Place, store: ObjectStore) -> None:
    """Refuse a journal with lost objects: no older checkpoint restores them."""
    if replayed.end < end_min:
        raise CorruptDataError(
            f"the journal {store.url} ends at {replayed.end}, but it had reached {end_min} when a"
            " checkpoint was taken: objects are missing, put them back"
        )
