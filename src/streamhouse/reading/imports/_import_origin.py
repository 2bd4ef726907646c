"""The source of an imported table's rows, in the property `table.import.source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.core.model.properties import IMPORT_SOURCE_PROPERTY
from streamhouse.core.model.table import TableInfo

if TYPE_CHECKING:
    from streamhouse.reading.files.appends import SourceTable

__all__ = ["ImportOrigin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOrigin:
    """The source, and the snapshot of the first imported rows (None: the source had no snapshot).

    The origin is part of the table's creation, so all imports into the table begin with the same
    rows.
    """

    PROPERTY: ClassVar[str] = IMPORT_SOURCE_PROPERTY

    name: str
    table_uuid: str
    snapshot_id: int | None
    sequence: int

    @classmethod
    def of(cls, source: SourceTable, name: str) -> ImportOrigin:
        """Return the origin of a new import."""
        if source.format_version < 2:
            raise UnsupportedError(
                f"Iceberg table '{name}' has format version 1, without the sequence numbers by"
                " which an import knows how far it is; upgrade it (property format-version = 2),"
                " which rewrites nothing"
            )
        start = source.start(source.snapshot_id)
        return cls(
            name=name,
            table_uuid=source.uuid,
            snapshot_id=start.snapshot_id,
            sequence=start.sequence,
        )

    @classmethod
    def of_table(cls, table: TableInfo, source: SourceTable, name: str) -> ImportOrigin:
        """Return a table's origin; raises `InvalidRequestError` if that is not `source`."""
        text = table.descriptor.properties.get(cls.PROPERTY)
        if text is None:
            raise InvalidRequestError(
                f"table '{table.path}' exists and was not made by an import: import '{name}' as"
                f" another table, or stream '{name}$iceberg' into it"
            )
        found_name, table_uuid, snapshot, sequence = text.split(" ")
        if table_uuid != source.uuid:
            raise InvalidRequestError(
                f"table '{table.path}' was imported from another table, '{found_name}' with uuid"
                f" {table_uuid}; '{name}' has uuid {source.uuid}: import it as another table"
            )
        return cls(
            name=found_name,
            table_uuid=table_uuid,
            snapshot_id=None if snapshot == "none" else int(snapshot),
            sequence=int(sequence),
        )

    def to_property(self) -> str:
        """Return the property's value."""
        return f"{self.name} {self.table_uuid} {self.snapshot_id or 'none'} {self.sequence}"

    @property
    def app_id(self) -> str:
        """Whose transactions an import's are."""
        return f"streamhouse-import-{self.table_uuid}"
