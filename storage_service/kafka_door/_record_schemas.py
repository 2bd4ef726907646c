"""The Avro schemas of one table's records that producers have registered, durable.

Invariants:
- a schema is on disk before its id is given out, and is never removed
- after a crash the file has all schemas whose ids were given out
- a damaged file gives nothing out and is not written: records have the file's ids, and another
  schema must not get such an id. The rest of the table is served

Event loop only, except for the values of `current`; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.kafka.registry.schema_set import SchemaSet
from streamhouse.storage_service.kafka.values import SchemaSource

__all__ = ["RecordSchemas", "schemas_of"]

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def schemas_of(table: OpenTable) -> RecordSchemas:
    """Return the schemas of a table's records."""
    return table.sidecar(RecordSchemas)


class RecordSchemas(Sidecar):
    """The schemas of one table's records."""

    file_name = "record_schemas"

    def __init__(self, file: StateFile, info: TableInfo, runtime: Runtime) -> None:
        """Read the schemas in `file`, which need not exist. Blocking."""
        self._file = file
        self._runtime = runtime
        self._set = SchemaSet(info.table_id)
        self._damage = ""
        self._lock = asyncio.Lock()
        self._end: StreamhouseError | None = None
        self._fits: TableInfo | None = None
        self._fitting: set[int] = set()
        self.changing = asyncio.Lock()
        """Held while a table is changed for a schema and the schema is registered."""
        try:
            if file.exists():
                self._set = SchemaSet.stored(info.table_id, file.load(), place=str(file.path))
        except CorruptDataError as error:
            _logger.error("event=schemas_damaged table=%s why=%r", info.path, error.message)
            self._damage = (
                f"table '{info.path}': its schemas of Avro are unreadable: {error.message}; put the"
                " file back from a backup"
            )

    def current(self) -> SchemaSet:
        """Return the schemas; raises `CorruptDataError` if the file is damaged."""
        if self._damage:
            raise CorruptDataError(self._damage)
        return self._set

    def source(self) -> SchemaSource:
        """Return the present schemas, for records being read or written on any thread."""
        return _Unreadable(self._damage) if self._damage else self._set

    def known(self) -> SchemaSet:
        """Return the schemas for listing: none if the file is damaged."""
        return self._set

    def do_fit(self, table: TableInfo, number: int | None = None) -> bool:
        """Whether records of the newest schemas can represent all rows of the present table.

        With a number, also whether the table need not change for records of that schema.
        """
        return self._fits is table and (number is None or number in self._fitting)

    def set_fitting(self, table: TableInfo, number: int | None = None) -> None:
        """Let `do_fit` return True from now on; the caller holds `changing`."""
        if self._fits is not table:
            self._fits = table
            self._fitting.clear()
        if number is not None:
            self._fitting.add(number)

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function, slow with wide schemas, on a thread."""
        return await self._runtime.run(function, *args)

    async def end(self, error: StreamhouseError) -> None:
        """Return once no save is in progress; later registrations raise `error`."""
        async with self._lock:
            self._end = error

    def go_on(self) -> None:
        """Allow registrations again after `end`."""
        self._end = None

    async def keep(self, schemas: SchemaSet) -> None:
        """Store `schemas`, which extend the present schemas; on disk on return.

        The caller holds `changing`. Raises as `StateFile.save`.
        """
        async with self._lock:
            if self._end is not None:
                raise type(self._end)(self._end.message)
            current = self.current()
            count = len(current.schemas)
            assert schemas.schemas[:count] == current.schemas, "no schema is removed"
            if schemas != current:
                await self._runtime.run(self._file.save, schemas.to_json())
                self._set = schemas


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Schemas of a damaged file: every call raises the error."""

    message: str

    def schema(self, _: int, /) -> str:
        raise CorruptDataError(self.message)

    def table_schema(self, _: int, /) -> int | None:
        raise CorruptDataError(self.message)

    def latest(self, _: TablePath, __: str, /) -> tuple[int, str]:
        raise CorruptDataError(self.message)
