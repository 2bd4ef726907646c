"""`service.json`: which databases and tables there are; nothing else decides that.

Invariants:
- a table exists exactly while it is among `tables`; a missing file or directory makes it damaged
- what is removed from disk is named in `dropped`, or in `creating` and without a row, before
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.state_file import FORMAT_VERSION
from streamhouse.storage_service.ownership.shards.tickets import Arrival, MoveTicket

__all__ = ["KnownTable", "ServiceState", "load_service_state", "save_service_state"]

_FORMER_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class KnownTable:
    """What is known of a table besides its own files.

    Its `table.json` has this generation or a later one. With `is_former` its files may be of the
    format that had no checksums, and some may never have been made.
    """

    path: TablePath
    generation: int = 0
    is_former: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        former = {"is_former": True} if self.is_former else {}
        return {"path": str(self.path), "generation": self.generation, **former}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KnownTable:
        """Read the JSON form."""
        path, generation = TablePath.parse(value["path"]), int(value["generation"])
        return cls(path, generation, bool(value.get("is_former", False)))


@dataclass(slots=True, kw_only=True)
class ServiceState:
    """Every id below `next_table_id` was used or is another shard's. Of `creating` and `dropped`
    tables remains may lie about. In one of several shards, ids from `ids_end` on are others', and
    `leaving` and `arriving` tables are on their way to another shard, or to this one."""

    next_table_id: int = 1
    ids_end: int | None = None
    databases: set[str] = field(default_factory=set)
    tables: dict[int, KnownTable] = field(default_factory=dict)
    creating: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    leaving: dict[int, MoveTicket] = field(default_factory=dict)
    arriving: dict[int, Arrival] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "next_table_id": self.next_table_id,
            "databases": sorted(self.databases),
            "tables": {str(number): known.to_json() for number, known in self.tables.items()},
            "creating": sorted(self.creating),
            "dropped": sorted(self.dropped),
            **({} if self.ids_end is None else {"ids_end": self.ids_end}),
            **({"leaving": _listed(self.leaving)} if self.leaving else {}),
            **({"arriving": _listed(self.arriving)} if self.arriving else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> ServiceState:
        """Read the JSON form; `where` names the file in a `CorruptDataError`."""
        if "tables" not in value and value.get("format") != _FORMER_VERSION:
            # Without a checksum: the one release that wrote such files wrote that version.
            raise CorruptDataError(
                f"{where}: format {value.get('format')!r} is not {FORMAT_VERSION}; this data"
                " directory belongs to another version of Streamhouse"
            )
        try:
            return cls(
                next_table_id=int(value["next_table_id"]),
                databases=set(map(str, value["databases"])),
                tables={
                    int(number): KnownTable.from_json(known)
                    for number, known in value.get("tables", {}).items()
                },
                creating=set(map(int, value.get("creating", ()))),
                dropped=set(map(int, value.get("dropped", ()))),
                ids_end=int(value["ids_end"]) if "ids_end" in value else None,
                leaving={
                    ticket.table_id: ticket
                    for ticket in map(MoveTicket.from_json, value.get("leaving", ()))
                },
                arriving={
                    arrival.ticket.table_id: arrival
                    for arrival in map(Arrival.from_json, value.get("arriving", ()))
                },
            )
        except (KeyError, TypeError, ValueError, StreamhouseError) as error:
            raise CorruptDataError(f"{where} says not what tables there are: {error!r}") from error


def _listed(moves: Mapping[int, MoveTicket | Arrival]) -> list[dict[str, Any]]:
    return [move.to_json() for _, move in sorted(moves.items())]


def load_service_state(directory: DataDirectory) -> tuple[ServiceState, bool]:
    """Return what service.json says, and whether it is of the format that named no tables.

    The directory knows its service's id then. Raises `CorruptDataError`.
    """
    directory.service_id = ""
    file = directory.service_state
    try:
        content = file.load()
        state = ServiceState.from_json(content, where=str(file.path))
        directory.service_id = str(content["service_id"])
        is_former = "tables" not in content
        if not is_former:
            # Once more, by the id that it says.
            directory.service_state.load()
    except KeyError as error:
        raise CorruptDataError(f"{file.path} names no service id") from error
    except CorruptDataError as error:
        if "another version" in error.message:
            raise
        raise CorruptDataError(f"{error.message}; {directory.service_file_hint}") from error
    directory.former.update(number for number, known in state.tables.items() if known.is_former)
    return state, is_former


def save_service_state(directory: DataDirectory, state: ServiceState) -> None:
    """Make `state` what the service knows, durably; raises as `StateFile.save`."""
    directory.service_state.save({**state.to_json(), "service_id": directory.service_id})
