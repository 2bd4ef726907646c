"""The live data files of a lake table, by bucket: what retracted rows are looked for in.

Manifests never change, so each is read once in a worker's life, and a round reads those that came
since the last: the work per round does not grow with the table.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.storage_service.lake.files.position_deletes import LakeFile
from streamhouse.storage_service.lake.snapshots.manifests import live_entries, manifests_of
from streamhouse.storage_service.model.lake import SYSTEM_FIELD_ID_FIRST

__all__ = ["LiveFiles", "LiveFilesCache", "live_data_files"]

_BUCKET_ID: Final = SYSTEM_FIELD_ID_FIRST
_OFFSET_ID: Final = SYSTEM_FIELD_ID_FIRST + 1
_OFFSET_MAX: Final = (1 << 63) - 1


class _ManifestFiles:
    """The data files of one manifest."""

    def __init__(self, manifest: ManifestFile, io: FileIO) -> None:
        self.by_bucket: dict[int, list[LakeFile]] = defaultdict(list)
        self.shared: list[LakeFile] = []
        for entry in live_entries(io, manifest):
            bucket, file = _lake_file(entry.data_file)
            if bucket is None:
                self.shared.append(file)
            else:
                self.by_bucket[bucket].append(file)

    @property
    def files(self) -> Iterable[LakeFile]:
        for members in self.by_bucket.values():
            yield from members
        yield from self.shared


class LiveFiles:
    """The live data files of one snapshot."""

    def __init__(self, manifests: Iterable[_ManifestFiles]) -> None:
        self._manifests = tuple(manifests)

    def of_bucket(self, bucket: int, *, before: int) -> tuple[LakeFile, ...]:
        """Return the files that may have rows of `bucket` with offsets below `before`."""
        return tuple(
            file
            for manifest in self._manifests
            for members in (manifest.by_bucket.get(bucket, ()), manifest.shared)
            for file in members
            if file.first_offset < before
        )

    def missing(self, paths: Iterable[str]) -> set[str]:
        """Return those of `paths` that are no live data files."""
        return set(paths) - {file.path for m in self._manifests for file in m.files}


class LiveFilesCache:
    """Remembers the manifests of one lake table's last snapshot. Not thread-safe."""

    def __init__(self) -> None:
        self._manifests: dict[str, _ManifestFiles] = {}

    def of(self, table: Table) -> LiveFiles:
        """Return the live files of the table's current snapshot."""
        snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
        found = {}
        for manifest in [] if snapshot is None else manifests_of(table.io, snapshot):
            path = manifest.manifest_path
            if manifest.content is ManifestContent.DATA and _is_live(manifest):
                found[path] = self._manifests.get(path) or _ManifestFiles(manifest, table.io)
        self._manifests = found
        return LiveFiles(found.values())


def live_data_files(table: Table) -> list[DataFile]:
    """Return all files of the current snapshot, those of rows and those of deletes."""
    snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
    return [
        entry.data_file
        for manifest in ([] if snapshot is None else manifests_of(table.io, snapshot))
        if _is_live(manifest)
        for entry in live_entries(table.io, manifest)
    ]


def _is_live(manifest: ManifestFile) -> bool:
    return manifest.has_added_files() or manifest.has_existing_files()


def _lake_file(file: DataFile) -> tuple[int | None, LakeFile]:
    """Return the file's bucket, None if it has or may have several, and the file."""
    lower: Mapping[int, bytes] = file.lower_bounds or {}
    upper: Mapping[int, bytes] = file.upper_bounds or {}
    first_bucket, last_bucket = lower.get(_BUCKET_ID), upper.get(_BUCKET_ID)
    bucket = None
    if first_bucket is not None and first_bucket == last_bucket:
        (bucket,) = struct.unpack("<i", first_bucket)
    return bucket, LakeFile(
        path=file.file_path,
        file_format=file.file_format.value,
        spec_id=file.spec_id,
        # A record of the manifest's own partition type: plain values, in the order of its spec.
        partition=tuple(file.partition[i] for i in range(len(file.partition))),
        first_offset=_offset(lower, unknown=0),
        last_offset=_offset(upper, unknown=_OFFSET_MAX - 1),
        is_shared=bucket is None,
    )


def _offset(bounds: Mapping[int, bytes], *, unknown: int) -> int:
    bound = bounds.get(_OFFSET_ID)
    return unknown if bound is None else int(struct.unpack("<q", bound)[0])
