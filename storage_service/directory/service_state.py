"""`service.json`: the one list of databases and tables.

Invariants:
- a table exists exactly while `tables` has an entry; with a missing file or directory the table is
  damaged
- files are removed from disk only after service.json has the table in `dropped`, or in `creating`
  without a row
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.state_file import FORMAT_VERSION
from streamhouse.storage_service.ownership.shards.tickets import Arrival, MoveTicket

__all__ = [
    "ServiceState",
    "TableEntry",
    "load_service_state",
    "save_service_state",
    "with_streams",
]

_FORMER_STREAMS_MAX: Final = 1_000
"""The streams of dropped tables that are remembered: some 100 bytes each."""

_FORMER_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table's entry in service.json.

    The table's `table.json` has this generation or a later one. With `is_former` its files may have
    the format without checksums, and some files may never have existed.
    """

    path: TablePath
    generation: int = 0
    is_former: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        former = {"is_former": True} if self.is_former else {}
        return {"path": str(self.path), "generation": self.generation, **former}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableEntry:
        """Read the JSON form."""
        path, generation = TablePath.parse(value["path"]), int(value["generation"])
        return cls(path, generation, bool(value.get("is_former", False)))


@dataclass(slots=True, kw_only=True)
class ServiceState:
    """Every id below `next_table_id` was used or belongs to another shard. `creating` and `dropped`
    tables may have files left. With several shards, ids from `ids_end` on belong to other
    shards, and `leaving` and `arriving` tables are on their way to another shard, or to this
    shard. `former_streams` are pairs of a dropped table's path and a stream that wrote the table,
    the latest drop last.
    """

    next_table_id: int = 1
    ids_end: int | None = None
    databases: set[str] = field(default_factory=set)
    tables: dict[int, TableEntry] = field(default_factory=dict)
    creating: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    leaving: dict[int, MoveTicket] = field(default_factory=dict)
    arriving: dict[int, Arrival] = field(default_factory=dict)
    former_streams: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "next_table_id": self.next_table_id,
            "databases": sorted(self.databases),
            "tables": {str(number): entry.to_json() for number, entry in self.tables.items()},
            "creating": sorted(self.creating),
            "dropped": sorted(self.dropped),
            **({} if self.ids_end is None else {"ids_end": self.ids_end}),
            **({"leaving": _moves_to_json(self.leaving)} if self.leaving else {}),
            **({"arriving": _moves_to_json(self.arriving)} if self.arriving else {}),
            **({"former_streams": self.former_streams} if self.former_streams else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> ServiceState:
        """Read the JSON form; `where` names the file in a `CorruptDataError`."""
        if "tables" not in value and value.get("format") != _FORMER_VERSION:
            # A file without a checksum: the only release that wrote such files wrote this version.
            raise CorruptDataError(
                f"{where}: format {value.get('format')!r} is not {FORMAT_VERSION}; this data"
                " directory belongs to another version of Streamhouse"
            )
        try:
            return cls(
                next_table_id=int(value["next_table_id"]),
                databases=set(map(str, value["databases"])),
                tables={
                    int(number): TableEntry.from_json(entry)
                    for number, entry in value.get("tables", {}).items()
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
                former_streams=[
                    (str(path), str(stream)) for path, stream in value.get("former_streams", ())
                ],
            )
        except (KeyError, TypeError, ValueError, StreamhouseError) as error:
            raise CorruptDataError(f"{where} says not what tables there are: {error!r}") from error


def _moves_to_json(moves: Mapping[int, MoveTicket | Arrival]) -> list[dict[str, Any]]:
    return [move.to_json() for _, move in sorted(moves.items())]


def with_streams(
    former: Sequence[tuple[str, str]], path: TablePath, streams: Iterable[str]
) -> list[tuple[str, str]]:
    """Return `former_streams` with the streams of a table that is being dropped."""
    new = dict.fromkeys((str(path), stream) for stream in sorted(streams))
    return [*(pair for pair in former if pair not in new), *new][-_FORMER_STREAMS_MAX:]


def load_service_state(directory: DataDirectory) -> tuple[ServiceState, bool]:
    """Return the state in service.json, and whether it has the old format without tables.

    The call sets the directory's service id. Raises `CorruptDataError`.
    """
    directory.service_id = ""
    file = directory.service_state
    try:
        content = file.load()
        state = ServiceState.from_json(content, where=str(file.path))
        directory.service_id = str(content["service_id"])
        is_former = "tables" not in content
        if not is_former:
            # Loaded again, now checked against the id.
            directory.service_state.load()
    except KeyError as error:
        raise CorruptDataError(f"{file.path} names no service id") from error
    except CorruptDataError as error:
        if "another version" in error.message:
            raise
        raise CorruptDataError(f"{error.message}; {directory.service_file_hint}") from error
    directory.former.update(number for number, entry in state.tables.items() if entry.is_former)
    return state, is_former


def save_service_state(directory: DataDirectory, state: ServiceState) -> None:
    """Save `state` as the service's state, durably; raises as `StateFile.save`."""
    directory.service_state.save({**state.to_json(), "service_id": directory.service_id})
