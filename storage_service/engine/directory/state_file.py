"""One state file: where it is, and what it must say it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamhouse.storage_service.engine.directory.durable_json import replace_file
from streamhouse.storage_service.engine.directory.sealed_json import StateIdentity, seal, unseal
from streamhouse.storage_service.errors import CorruptDataError

__all__ = ["StateFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """`is_former`: it may still be of the format without checksums. Blocking."""

    path: Path
    identity: StateIdentity
    is_former: bool = False

    def exists(self) -> bool:
        """Whether there is such a file."""
        return self.path.exists()

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
        replace_file(self.path, seal(self.identity, content))
