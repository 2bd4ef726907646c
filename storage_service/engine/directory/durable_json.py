"""Small files, replaced as a whole: after a crash a file is the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from streamhouse.storage_service.errors import (
    CorruptDataError,
    StorageFailedError,
    UnknownOutcomeError,
)

__all__ = ["read_json", "replace_file", "replace_json", "sync_directory"]

_TEMPORARY_SUFFIX: Final = ".tmp"


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Make `value` the content of `path`, as `replace_file`."""
    replace_file(path, json.dumps(value, indent=1).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`; it is durable on return.

    Raises `StorageFailedError`, and then `path` has its old content, or `UnknownOutcomeError`, and
    then it has the new one, which a crash may undo.
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageFailedError(
            f"cannot write {path.name}: {error.strerror}; nothing was changed"
        ) from error
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise UnknownOutcomeError(
            f"the disk failed to sync {path.parent.name} after {path.name} was replaced:"
            f" {error.strerror}; check the disk, restart the service and look what it has"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of `path`; raises `CorruptDataError` if it is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{path} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{path} holds no JSON object")
    return value


def sync_directory(path: Path) -> None:
    """Make created, renamed and deleted entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
