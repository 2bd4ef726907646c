"""State files: JSON with an identity and a checksum, replaced as a whole.

    {"crc32c": "0a1b2c3d",
    "content": {...},
    "format": 2,
    "kind": "lake",
    "service_id": "...",
    "table_id": 7}

Invariants:
- `unseal` returns exactly the sealed content, of this kind, this service and this table; anything
  else is a CorruptDataError that names the difference
- the checksum covers the other members in canonical form: only white space may change unnoticed
- after a crash a file is the old one or the new one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from streamhouse.core.errors import (
    CorruptDataError,
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably

__all__ = [
    "FORMAT_VERSION",
    "StateFile",
    "StateIdentity",
    "is_of_another_format",
    "read_json",
    "replace_file",
    "replace_json",
    "seal",
    "unseal",
]

FORMAT_VERSION: Final = 2
"""Format 1 had neither checksum nor identity; the first start seals such files."""

_MEMBERS: Final = {"content", "format", "kind", "service_id", "table_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIdentity:
    """The subject of a state file; `table_id` is None for the state of all tables."""

    kind: str
    service_id: str
    table_id: int | None = None


def seal(identity: StateIdentity, content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a state file."""
    text = _canonical(
        {
            "content": content,
            "format": FORMAT_VERSION,
            "kind": identity.kind,
            "service_id": identity.service_id,
            "table_id": identity.table_id,
        }
    )
    return f'{{"crc32c": "{_checksum(text)}",\n{text[1:]}\n'.encode()


def unseal(
    data: bytes, identity: StateIdentity, *, where: str, is_former: bool = False
) -> dict[str, Any]:
    """Return the content of a state file; `where` names the file in errors.

    With `is_former` the file may be in format 1: the bare content. An empty `service_id` accepts
    any service: for the file from which the service learns its own id.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{where} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{where} holds no JSON object")
    if is_former and "content" not in value and "crc32c" not in value:
        return value
    checksum = value.pop("crc32c", None)
    if set(value) != _MEMBERS or checksum is None:
        raise CorruptDataError(f"{where} is damaged: it is no state file with a checksum")
    if checksum != _checksum(_canonical(value)):
        raise CorruptDataError(f"{where} is damaged: its checksum is wrong")
    if value["format"] != FORMAT_VERSION:
        raise CorruptDataError(
            f"{where} has format {value['format']}, which this release cannot read: it is of"
            " another version of Streamhouse"
        )
    stated = (value["kind"], value["service_id"], value["table_id"])
    expected = (identity.kind, identity.service_id or value["service_id"], identity.table_id)
    for name, is_, should in zip(("kind", "service", "table"), stated, expected, strict=True):
        if is_ != should:
            raise CorruptDataError(f"{where} is of another {name}: {is_!r}, not {should!r}")
    content = value["content"]
    if not isinstance(content, dict):
        raise CorruptDataError(f"{where} holds no JSON object")
    return content


def is_of_another_format(data: bytes) -> bool:
    """Return whether the bytes are a whole state file in a format that this release cannot read.

    A file that may be dropped when damaged must be kept in this case: another release can read it.
    """
    try:
        value = json.loads(data)
        checksum = value.pop("crc32c")
        return bool(checksum == _checksum(_canonical(value)) and value["format"] != FORMAT_VERSION)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False


def _canonical(value: Mapping[str, Any]) -> str:
    # One line a member: operators read these files, too.
    return json.dumps(value, sort_keys=True, separators=(",\n", ": "))


def _checksum(text: str) -> str:
    return f"{crc32c(text.encode()):08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """A state file on disk; with `is_former` possibly in the format without checksums. Blocking."""

    path: Path
    identity: StateIdentity
    filesystem: Filesystem
    is_former: bool = False

    def exists(self) -> bool:
        """Return whether the file exists."""
        return self.path.exists()

    def is_of_another_format(self) -> bool:
        """Return whether the file is whole, in a format that this release cannot read."""
        try:
            return is_of_another_format(self.path.read_bytes())
        except OSError:
            return False

    def load(self) -> dict[str, Any]:
        """Return the content; raises `CorruptDataError` for a missing, damaged or foreign file."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptDataError(f"{self.path} is missing") from error
        except OSError as error:
            raise CorruptDataError(f"{self.path} is unreadable: {error.strerror}") from error
        return unseal(data, self.identity, where=str(self.path), is_former=self.is_former)

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace the content durably; raises as `replace_file`."""
        replace_file(self.filesystem, self.path, seal(self.identity, content))


def replace_json(filesystem: Filesystem, path: Path, value: Mapping[str, Any]) -> None:
    """Replace the content of `path` by `value`; raises as `replace_file`."""
    replace_file(filesystem, path, json.dumps(value, indent=1).encode())


def replace_file(filesystem: Filesystem, path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`, durable on return.

    Raises `StorageFailedError`, and `path` keeps its old content; or `UnknownOutcomeError`, and
    `path` has the new content, which a crash may undo.
    """
    try:
        replace_durably(filesystem, path, [data])
    except OSError as error:
        raise StorageFailedError(
            f"cannot write {path.name}: {error.strerror}; nothing was changed"
        ) from error
    try:
        filesystem.sync_directory(path.parent)
    except OSError as error:
        raise UnknownOutcomeError(
            f"the disk failed to sync {path.parent.name} after {path.name} was replaced:"
            f" {error.strerror}; check the disk, restart the service and look what it has"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of `path`; raises `CorruptDataError` unless it is a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{path} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{path} holds no JSON object")
    return value
