"""Whether everything that a lake table's snapshots refer to is there, told by stock pyiceberg."""

from __future__ import annotations

from pathlib import Path

from pyiceberg.table import Table

__all__ = ["missing_files"]


def missing_files(table: Table) -> list[str]:
    """Return the manifest lists, manifests, data and delete files of any snapshot that are gone."""
    missing: set[str] = set()
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        if not _is_there(snapshot.manifest_list):
            missing.add(snapshot.manifest_list)
            continue
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            if not _is_there(manifest.manifest_path):
                missing.add(manifest.manifest_path)
                continue
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if not _is_there(entry.data_file.file_path):
                    missing.add(entry.data_file.file_path)
    return sorted(missing)


def _is_there(uri: str) -> bool:
    return Path(uri.removeprefix("file://")).exists()
