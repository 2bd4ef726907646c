"""State files as tests need them: made, looked into, changed and sealed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamhouse.storage_service.directory.state_file import StateFile, StateIdentity, seal
from streamhouse.storage_service.log.filesystem import LocalFilesystem

__all__ = ["content_of", "reseal", "state_file"]


def state_file(path: Path, kind: str) -> StateFile:
    """Return the state file at `path`, of table 1 of some service."""
    identity = StateIdentity(kind=kind, service_id="tests", table_id=1)
    return StateFile(path=path, identity=identity, filesystem=LocalFilesystem())


def content_of(path: Path) -> Any:
    """Return what is in a state file, whatever it says it is."""
    return json.loads(path.read_text(encoding="utf-8"))["content"]


def reseal(path: Path, change: Callable[[Any], None]) -> None:
    """Let `change` change what is in a state file, as who wrote it would have."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value["content"])
    identity = StateIdentity(
        kind=value["kind"], service_id=value["service_id"], table_id=value["table_id"]
    )
    path.write_bytes(seal(identity, value["content"]))
