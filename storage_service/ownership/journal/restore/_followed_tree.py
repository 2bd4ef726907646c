"""The tree of a directory following a journal, and the packs with the bytes of its files.

The tree has the packs of its first checkpoint. Meanwhile the owner takes further checkpoints, and
deletes unneeded packs. So a takeover uses the packs of the newest checkpoint, for files neither
replaced nor moved since. All other files are read from the disk again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.durable_mark import MARK_NAME
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import JournalObject
from streamhouse.storage_service.ownership.journal.operations import Move, Replace
from streamhouse.storage_service.ownership.journal.tree import (
    Held,
    JournalTree,
    Local,
    Packed,
    TreeFile,
)

__all__ = ["FollowedTree"]


class FollowedTree:
    """See the module. `tree` is the state before `start`, based on the checkpoint `manifest`."""

    def __init__(self, tree: JournalTree, *, start: Place, manifest: Manifest | None) -> None:
        self._tree: Final = tree
        self._start = (start, 0)
        self._manifest = manifest
        self._since: dict[str, tuple[Place, int]] = {}
        """The last operation replacing or moving each file, if after the start."""

    @property
    def tree(self) -> JournalTree:
        """The tree of all applied operations."""
        return self._tree

    def apply(self, journal_object: JournalObject) -> None:
        """Apply the operations of the next object; raises `CorruptDataError`."""
        for index, operation in enumerate(journal_object.operations):
            self._tree.apply(
                operation, place=(journal_object.place.epoch, journal_object.place.seq, index)
            )
            next_place = (journal_object.place, index + 1)
            match operation:
                case Replace(path):
                    self._since[path] = next_place
                case Move(_, target):
                    below = [file.path for file in self._tree if file.path.startswith(f"{target}/")]
                    self._since.update(dict.fromkeys(below, next_place))
                case _:
                    pass

    def on(self, manifest: Manifest | None, directory: Path) -> JournalTree:
        """Return the tree with the packs of `manifest`, the newest; `directory` has its files."""
        made_of = None if self._manifest is None else self._manifest.place
        if manifest is not None and manifest.place == made_of:
            return self._tree
        tree = JournalTree()
        for path in self._tree.directories:
            tree.add_directory(path)
        for file in self._tree:
            packed = self._packed(file, manifest)
            if packed is not None:
                tree.add_file(packed)
            else:
                tree.add_file(_unpacked(file, directory))
        return tree

    def _packed(self, file: TreeFile, manifest: Manifest | None) -> TreeFile | None:
        """Return the file with the manifest's packs, if surely unchanged."""
        if manifest is None:
            return None
        packed_file = manifest.tree.get(file.path)
        is_same = self._since.get(file.path, self._start) <= (manifest.place, manifest.applied)
        if (
            packed_file is None
            or packed_file.is_left_out
            or not is_same
            or packed_file.length > file.length
        ):
            return None
        if not all(isinstance(piece, Packed) for piece in packed_file.pieces):
            return None
        tail = [Local(file.length - packed_file.length)] if file.length > packed_file.length else []
        return TreeFile(
            file.path,
            file.length,
            file.crc32c,
            [*packed_file.pieces, *tail],
            packed_length=packed_file.length,
            packed_crc32c=packed_file.crc32c,
        )


def _unpacked(file: TreeFile, directory: Path) -> TreeFile:
    if file.path.endswith(f"/{MARK_NAME}"):
        # A served mark is overwritten in place, so the journalled bytes are kept in memory.
        held_piece = Held((directory / file.path).read_bytes())
        return TreeFile(file.path, file.length, file.crc32c, [held_piece])
    pieces = [Local(file.length)] if file.length else []
    return TreeFile(file.path, file.length, file.crc32c, list(pieces))
