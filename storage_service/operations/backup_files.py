"""A backup as files: the staged data directory, and `manifest.json` with the checksums of all.

The manifest is written last: a directory without a manifest is no backup. A restore copies, and
changes nothing in a backup.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from streamhouse.core.errors import (
    AlreadyExistsError,
    CorruptDataError,
    InvalidRequestError,
    StorageFailedError,
)
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.storage_service.directory.state_file import read_json, replace_json
from streamhouse.storage_service.log.filesystem import LocalFilesystem

__all__ = ["MANIFEST", "restore_backup", "verify_backup", "write_backup"]

MANIFEST: Final = "manifest.json"
FORMAT_VERSION: Final = 1
_COPY_BYTES: Final = 8 << 20


def write_backup(
    staged: Path, target: Path, facts: Mapping[str, Any], *, progress: Progress = NO_PROGRESS
) -> dict[str, Any]:
    """Move a staged backup to the new or empty directory `target`; return the manifest.

    On the same file system the files stay hard links to the service's files; otherwise they are
    copied. Everything is durable on return.
    """
    _claim_empty(target, "backup")
    try:
        files: dict[str, dict[str, Any]] = {}
        names = list(_files_below(staged))
        progress.expect(sum((staged / name).stat().st_size for name in names))
        for name in names:
            _make_parents(target / name)
            _move(staged / name, target / name)
            files[str(name)] = _fingerprint(target / name, progress)
        _sync_tree(target)
        manifest = {"format_version": FORMAT_VERSION, **facts, "files": files}
        replace_json(LocalFilesystem(), target / MANIFEST, manifest)
    except OSError as error:
        raise StorageFailedError(f"the backup cannot be written to {target}: {error}") from error
    return manifest


def verify_backup(backup: Path, *, progress: Progress = NO_PROGRESS) -> dict[str, Any]:
    """Return the manifest; raises `CorruptDataError` unless every file is unchanged."""
    manifest = _read_manifest(backup)
    progress.expect(_bytes_of(manifest))
    for name, expected in manifest["files"].items():
        _safe_name(name)
        _check_file(backup / name, expected, progress)
    return manifest


def restore_backup(
    backup: Path, data_dir: Path, *, progress: Progress = NO_PROGRESS
) -> dict[str, Any]:
    """Copy a backup into the new or empty directory `data_dir`; return the manifest.

    Every copy is compared with the manifest. A directory with an unfinished restore is refused by
    the next restore, because it is not empty, and by the service.

    Raises `CorruptDataError` for a damaged backup.
    """
    manifest = _read_manifest(backup)
    if manifest["with_lake"] and Path(manifest["data_dir"]) != data_dir.absolute():
        raise InvalidRequestError(
            f"the backup has the lake of {manifest['data_dir']}, and Iceberg knows its files by"
            f" that path: restore it there, not to {data_dir.absolute()}"
        )
    _claim_empty(data_dir, "restore")
    progress.expect(_bytes_of(manifest))
    try:
        # Written last: without service.json a service refuses a directory with tables.
        for name, expected in sorted(manifest["files"].items(), key=_service_file_last):
            target = data_dir / _safe_name(name)
            _make_parents(target)
            _copy(backup / name, target)
            _check_file(target, expected, progress, source=backup / name)
        _sync_tree(data_dir)
    except OSError as error:
        raise StorageFailedError(f"the backup cannot be restored: {error}") from error
    return manifest


def _read_manifest(backup: Path) -> dict[str, Any]:
    if not (backup / MANIFEST).is_file():
        raise InvalidRequestError(f"{backup} is no backup: it has no {MANIFEST}")
    manifest = read_json(backup / MANIFEST)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CorruptDataError(
            f"{backup} has backup format {manifest.get('format_version')}, which this release"
            " cannot read"
        )
    return manifest


def _bytes_of(manifest: Mapping[str, Any]) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def _service_file_last(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] == "service.json", item[0]


def _claim_empty(directory: Path, purpose: str) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise AlreadyExistsError(
            f"{directory} is not empty; a {purpose} needs a directory of its own"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailedError(f"{directory} cannot be made: {error.strerror}") from error


def _safe_name(name: str) -> str:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise CorruptDataError(f"the backup's manifest names a file outside of it: {name}")
    return name


def _files_below(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory)


def _make_parents(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _move(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copy2(source, target)
    except FileNotFoundError as error:
        raise CorruptDataError(f"{source} is missing from the backup") from error


def _fingerprint(path: Path, progress: Progress) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_COPY_BYTES):
            digest.update(piece)
            size += len(piece)
            progress.done(len(piece))
    return {"bytes": size, "sha256": digest.hexdigest()}


def _check_file(
    path: Path, expected: Mapping[str, Any], progress: Progress, *, source: Path | None = None
) -> None:
    try:
        actual = _fingerprint(path, progress)
    except FileNotFoundError as error:
        raise CorruptDataError(f"{path} is missing from the backup") from error
    if actual != expected:
        raise CorruptDataError(
            f"{source or path} is damaged: {actual['bytes']} bytes with another checksum than the"
            f" {expected['bytes']} that were backed up"
        )


def _sync_tree(directory: Path) -> None:
    """Make all files and directories below `directory` durable."""
    filesystem = LocalFilesystem()
    for path in directory.rglob("*"):
        if path.is_dir():
            filesystem.sync_directory(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    filesystem.sync_directory(directory)
