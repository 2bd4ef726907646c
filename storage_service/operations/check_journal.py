"""The check of a journal: could an empty machine restore the service from it?

Reads only, also while a service writes the journal: the report is then as of the beginning of the
check. The check covers the names, each epoch's open object and seal, the chain of checksums from
the older checkpoint on, both manifests with every byte of their files, and the equality of both
resulting trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.core.threads import Pool
from streamhouse.storage_service.operations.findings import Finding, Severity
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest
from streamhouse.storage_service.ownership.journal.checkpoints.packs import read_packed
from streamhouse.storage_service.ownership.journal.epochs import newest_epoch, open_facts
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    JournalObject,
    ObjectKind,
    decode_object,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.operations import Append, Replace
from streamhouse.storage_service.ownership.journal.reader import JournalReader, TrimmedError
from streamhouse.storage_service.ownership.journal.restore.journalled_state import (
    READ_AHEAD,
    Replay,
    check_manifest,
    check_newest_epoch,
    list_checkpoints,
    load_manifest,
    pack_lengths,
)
from streamhouse.storage_service.ownership.journal.steps import run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
)
from streamhouse.storage_service.ownership.journal.tree import (
    Held,
    Journalled,
    JournalTree,
    Packed,
    TreeFile,
)

__all__ = ["JournalReport", "check_journal", "read_file"]

_THREADS: Final = 6


@dataclass(slots=True, kw_only=True)
class JournalReport:
    """The result of a check of a shard's journal."""

    url: str
    shard: str
    epochs: int = 0
    objects: int = 0
    operations: int = 0
    checkpoints: int = 0
    packs_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    end: Place | None = None
    """The end of the part that was read, if it was read."""
    tree: JournalTree | None = None
    """The files at that place, if known."""

    @property
    def is_sound(self) -> bool:
        """Whether the service can be restored from the journal."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    def error(self, where: str, problem: str) -> None:
        """Note a fault that makes a restore fail, now or later."""
        self.findings.append(Finding(Severity.ERROR, where, problem))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        field_names = (
            "url",
            "shard",
            "epochs",
            "objects",
            "operations",
            "checkpoints",
            "packs_bytes",
        )
        return {name: getattr(self, name) for name in field_names} | {
            "is_sound": self.is_sound,
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_journal(
    store: ObjectStore, names: ShardNames, *, progress: Progress = NO_PROGRESS
) -> JournalReport:
    """Check one shard's journal; progress counts bytes of packs. Raises the store's errors."""
    report = JournalReport(url=store.url, shard=names.shard)
    service_id = _service_id(store, names, report)
    if service_id is None:
        return report
    _check_epochs(store, names, journal_identity(service_id, names.shard), report)
    try:
        check_newest_epoch(store, names)
    except CorruptDataError as error:
        report.error(names.journal, error.message)
    trees: list[JournalTree] = []
    places = list_checkpoints(store, names)
    report.checkpoints = len(places)
    packs = pack_lengths(store, names)
    for place in places[-2:]:
        tree = _check_checkpoint(store, names, place, packs, service_id, report, progress)
        if tree is not None:
            trees.append(tree)
    if not places:
        tree = _end_of(store, names, None, service_id, report)
        if tree is not None:
            trees.append(tree)
    if not trees:
        report.error(names.shard, "no checkpoint, with what came after it, makes the service again")
    elif any(tree.facts() != trees[0].facts() for tree in trees):
        report.error(names.checkpoints, "the two checkpoints lead to different files")
    else:
        report.tree = trees[-1]
    return report


def _service_id(store: ObjectStore, names: ShardNames, report: JournalReport) -> str | None:
    """Return the journal's service id; None without a journal, or after damage, which is noted."""
    first = Place(1, 0)
    opened = _object(store, names, first, None, report)
    if opened is None and not report.findings:
        where = names.object(first)
        report.error(where, "it is missing: there is no journal, as epoch 1 was never opened")
        return None
    report.epochs = 1
    try:
        return None if opened is None else open_facts(opened, key=names.object(first)).service_id
    except CorruptDataError as error:
        report.error(names.object(first), error.message)
        return None


def read_file(store: ObjectStore, names: ShardNames, file: TreeFile) -> bytes:
    """Return a small file of a checked tree.

    Raises `CorruptDataError` for a damaged file, or a file trimmed since the check.
    """
    data = b""
    for piece in file.pieces:
        match piece:
            case Packed():
                data += bytes(read_packed(store, names, [piece])[0])
            case Held():
                data += piece.data
            case Journalled(epoch, seq, index):
                data += _data(store, names, Place(epoch, seq), index)
            case _:
                raise AssertionError(f"{piece} is in no store")
    # Pack and object have verified their own checksums.
    if len(data) != file.length:
        raise CorruptDataError(f"{file.path} is not what the journal says")
    return data


def _data(store: ObjectStore, names: ShardNames, place: Place, index: int) -> bytes:
    key = names.object(place)
    try:
        journal_object = decode_object(
            store.get(key, bytes_max=OBJECT_BYTES_MAX), key=key, place=place
        )
    except ObjectNotFoundError as error:
        raise CorruptDataError(f"{key} is missing, although it was just there") from error
    operation = journal_object.operations[index]
    if not isinstance(operation, Append | Replace):
        raise CorruptDataError(f"{key} changes no file's bytes by operation {index}")
    return bytes(operation.data)


def _check_epochs(
    store: ObjectStore, names: ShardNames, journal: bytes, report: JournalReport
) -> None:
    """Check each epoch but the last: the open object, and the seal before the next epoch."""
    epoch = 1
    while True:
        report.epochs = epoch
        following = _opened(store, names, epoch + 1, journal, report)
        if following is None:
            newest = run_on(store, newest_epoch(names, at_least=epoch))
            if newest == epoch:
                return
            # The owner may have opened the epoch since the request.
            following = _opened(store, names, epoch + 1, journal, report)
        if following is None:
            report.error(
                names.object(Place(epoch + 1, 0)),
                f"epoch {newest} has objects, and nothing opens epoch {epoch + 1}: put that back,"
                " or remove what is not of this journal",
            )
            return
        try:
            facts = open_facts(following, key=names.object(following.place))
        except CorruptDataError as error:
            report.error(names.object(following.place), error.message)
            return
        place = Place(epoch, facts.previous_seal_seq)
        sealed = _object(store, names, place, journal, report)
        if sealed is None:
            report.error(names.object(place), f"epoch {epoch} has no seal: put it back")
        elif sealed.kind is not ObjectKind.SEAL:
            report.error(names.object(place), f"it is not the seal of epoch {epoch}")
        elif sealed.checksum != following.previous_checksum:
            report.error(names.object(place), f"epoch {epoch + 1} follows another seal")
        epoch += 1


def _opened(
    store: ObjectStore, names: ShardNames, epoch: int, journal: bytes | None, report: JournalReport
) -> JournalObject | None:
    return _object(store, names, Place(epoch, 0), journal, report)


def _object(
    store: ObjectStore,
    names: ShardNames,
    place: Place,
    journal: bytes | None,
    report: JournalReport,
) -> JournalObject | None:
    key = names.object(place)
    try:
        data = store.get(key, bytes_max=OBJECT_BYTES_MAX)
        return decode_object(data, key=key, place=place, journal=journal)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        report.error(key, error.message)
        return None


def _check_checkpoint(
    store: ObjectStore,
    names: ShardNames,
    place: Place,
    packs: Mapping[str, int],
    service_id: str,
    report: JournalReport,
    progress: Progress,
) -> JournalTree | None:
    """Return the tree of a checkpoint, None if the checkpoint is unusable."""
    key = names.checkpoint(place)
    try:
        manifest = load_manifest(store, names, place)
        check_manifest(manifest, packs, service_id=service_id)
    except CorruptDataError as error:
        report.error(key, error.message)
        return None
    pieces = list(_pieces(manifest))
    size = sum(piece.length for piece in pieces)
    report.packs_bytes += size
    progress.expect(size)

    def problem(piece: Packed) -> str:
        try:
            read_packed(store, names, [piece])
        except CorruptDataError as error:
            return error.message
        finally:
            progress.done(piece.length)
        return ""

    with Pool("journal-check", _THREADS) as threads:
        problems = sorted(filter(None, set(threads.map(problem, pieces))))
    for problem_text in problems:
        report.error(key, problem_text)
    return None if problems else _end_of(store, names, manifest, service_id, report)


def _pieces(manifest: Manifest) -> Iterator[Packed]:
    for file in manifest.tree:
        yield from (piece for piece in file.pieces if isinstance(piece, Packed))
    for rows in manifest.key_rows:
        for key in rows.files:
            yield from key.pieces


def _end_of(
    store: ObjectStore,
    names: ShardNames,
    manifest: Manifest | None,
    service_id: str,
    report: JournalReport,
) -> JournalTree | None:
    """Return the tree at the journal's end, from a checkpoint or from the beginning on."""
    replay = Replay(manifest)
    journal = journal_identity(service_id, names.shard)
    reader = JournalReader(store, names, start=replay.start, journal=journal, ahead=READ_AHEAD)
    report.objects = report.operations = 0
    try:
        # The owner goes on writing: both checkpoints are followed to the same end.
        while report.end is None or reader.place < report.end:
            if (journal_object := reader.next()) is None:
                break
            replay.apply(journal_object)
            report.objects += 1
            report.operations += len(journal_object.operations)
        replay.tree.check_whole()
        report.end = reader.place
    except (CorruptDataError, TrimmedError) as error:
        report.error(names.object(reader.place), str(error))
        return None
    finally:
        reader.close()
    if manifest and replay.end < manifest.stored_until:
        report.error(
            names.object(replay.end),
            f"the journal ends here, but it had reached {manifest.stored_until} when checkpoint"
            f" {manifest.place} was taken: objects are missing, put them back",
        )
        return None
    return replay.tree
