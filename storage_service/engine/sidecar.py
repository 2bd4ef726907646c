"""A door's own state of one table, in a file beside the table's other files.

The engine opens the file with the table and ends all saves before the table is closed or moved.
The engine does not read the content.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile

__all__ = ["Sidecar"]


class Sidecar(abc.ABC):
    """State of one table that only a door understands."""

    file_name: ClassVar[str]
    """The name of the state file in the table's folder, without the ending."""

    @abc.abstractmethod
    def __init__(self, file: StateFile, info: TableInfo, runtime: Runtime) -> None:
        """Read `file`, which need not exist. Blocking; a damaged file must not raise."""

    @abc.abstractmethod
    async def end(self, error: StreamhouseError) -> None:
        """Return once no save is in progress; later saves raise `error`."""

    @abc.abstractmethod
    def go_on(self) -> None:
        """Allow saves again after `end`."""
