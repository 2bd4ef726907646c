"""The schemas of Avro of one table's records, durable: those that producers have registered.

Invariants:
- a schema is on disk before its id is given out, and is never taken away
- after a crash the file has all schemas whose ids were given out
- a file that is damaged gives nothing out, and is not written: the ids in it are in records, and
  another schema must not get one of them. The rest of the table is served
Event loop only, besides what `current` returns; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile
from streamhouse.storage_service.kafka.registry.schema_set import SchemaSet

if TYPE_CHECKING:
    # The room of values needs the libraries of the extra.
    from streamhouse.storage_service.kafka.values import SchemaSource

__all__ = ["RecordSchemas", "load_schemas"]

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def load_schemas(file: StateFile, table_id: int) -> SchemaSet:
    """Return the schemas in a file, none if there is none; raises `CorruptDataError`. Blocking."""
    if not file.exists():
        return SchemaSet(table_id)
    content = file.load()
    try:
        return SchemaSet.from_json(table_id, content)
    except (StreamhouseError, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{file.path} holds no schemas of records: {error}") from error


class RecordSchemas:
    """See the module."""

    def __init__(self, file: StateFile, *, table: str, table_id: int, runtime: Runtime) -> None:
        """Read those in `file`; it need not exist. Blocking."""
        self._file = file
        self._table = table
        self._runtime = runtime
        self._set = SchemaSet(table_id)
        self._damage = ""
        self._lock = asyncio.Lock()
        self._end: StreamhouseError | None = None
        self._fits: TableInfo | None = None
        self._fitting: set[int] = set()
        self.changing = asyncio.Lock()
        """Held by who changes the table for a schema, and registers it then."""
        try:
            self._set = load_schemas(file, table_id)
        except CorruptDataError as error:
            _logger.error("event=schemas_damaged table=%s why=%r", table, error.message)
            self._damage = (
                f"table '{table}': its schemas of Avro are unreadable: {error.message}; put the"
                " file back from a backup"
            )

    def current(self) -> SchemaSet:
        """Return the schemas there are; raises `CorruptDataError` if that is not known."""
        if self._damage:
            raise CorruptDataError(self._damage)
        return self._set

    def source(self) -> SchemaSource:
        """Return the schemas there are now, for records that are read or written, on any thread."""
        return _Unreadable(self._damage) if self._damage else self._set

    def known(self) -> SchemaSet:
        """Return the schemas for a list: none if the file is damaged."""
        return self._set

    def do_fit(self, table: TableInfo, number: int | None = None) -> bool:
        """Whether the newest schemas have all rows of a table as it is, as far as that is known.

        With a number, also that the table need not change for records of that schema.
        """
        return self._fits is table and (number is None or number in self._fitting)

    def found_fitting(self, table: TableInfo, number: int | None = None) -> None:
        """Know from now on what `do_fit` tells; for who holds `changing`."""
        if self._fits is not table:
            self._fits = table
            self._fitting.clear()
        if number is not None:
            self._fitting.add(number)

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run what takes long with wide schemas on a thread."""
        return await self._runtime.run(function, *args)

    async def end(self, error: StreamhouseError) -> None:
        """Return when nothing is being saved, and nothing will be: who registers gets `error`."""
        async with self._lock:
            self._end = error

    def go_on(self) -> None:
        """Register after `end` as before it."""
        self._end = None

    async def keep(self, schemas: SchemaSet) -> None:
        """Make `schemas`, which are those there are and more, the table's; on disk on return.

        For who holds `changing`. Raises as `StateFile.save`.
        """
        async with self._lock:
            if self._end is not None:
                raise type(self._end)(self._end.message)
            current = self.current()
            assert schemas.schemas[: len(current.schemas)] == current.schemas, "none is taken away"
            if schemas != current:
                await self._runtime.run(self._file.save, schemas.to_json())
                self._set = schemas


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Schemas that are not known; whoever asks for one gets the error."""

    message: str

    def schema(self, _: int, /) -> str:
        raise CorruptDataError(self.message)

    def table_schema(self, _: int, /) -> int | None:
        raise CorruptDataError(self.message)

    def latest(self, _: TablePath, __: str, /) -> tuple[int, str]:
        raise CorruptDataError(self.message)
