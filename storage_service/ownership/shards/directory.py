"""The shard directory of one service: its id, the ids of tables, and the shard of each table.

Invariants (decision 0021):
- a name is held by one shard at a time; only the holder frees the name
- an id belongs to one block, a block to one shard; a shard's process uses an id once
- a shard finds its names without tables itself: at its start, and before a hold

The shard directory trusts a shard's process without proof of ownership. The shard's journal proves
ownership, because a table exists only in the journal.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from streamhouse.core.errors import (
    CorruptDataError,
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    InvalidNameError,
    InvalidRequestError,
    OverloadedError,
    StreamhouseError,
    TableExistsError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.table import (
    DEFAULT_DATABASE,
    TablePath,
    check_no_twin,
    twins,
)
from streamhouse.storage_service.ownership.shards.chain import (
    Chains,
    DirectoryObjects,
    Each,
    Version,
    version_key,
)
from streamhouse.storage_service.ownership.shards.entries import (
    FREE,
    Folder,
    NameEntry,
    NameState,
    check_shard_name,
    seal,
    unseal,
)
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket

__all__ = ["BLOCK_IDS", "IdBlock", "ShardDirectory", "ShardRecord", "known_service_id"]

_logger = logging.getLogger(__name__)

BLOCK_IDS: Final = 1_000
_SERVICE: Final = Folder.SERVICE
_IDS: Final = Folder.IDS
_TABLES: Final = Folder.TABLES
_DATABASES: Final = Folder.DATABASES
_SHARDS: Final = Folder.SHARDS
_HELD: Final = Folder.HELD
# Each race means a concurrent change of the same name.
_RACES_MAX: Final = 100
_BLOCK_MAX: Final = 10**8 - 1


class IdBlock(NamedTuple):
    """Ids for the tables of one shard, each used once."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A shard's report: load in thousandths of a core, and its tables."""

    shard: str
    load_millicores: int = 0
    table_count: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "shard": self.shard,
            "load_millicores": self.load_millicores,
            "table_count": self.table_count,
        }


class ShardDirectory:
    """The shard directory, as one shard uses it. Thread-safe, blocking.

    `each` reads many objects: `map` of a pool of threads reserved for these reads.
    """

    def __init__(
        self,
        store: DirectoryObjects,
        *,
        shard: str,
        sleep: Callable[[float], object] = time.sleep,
        each: Each = map,
    ) -> None:
        check_shard_name(shard)
        self.shard = shard
        self._store = store
        self._each = each
        self._chains = Chains(store, sleep=sleep, each=each)

    # -- the service and its ids -----------------------------------------------------------------

    def join(self, service_id: str | None, *, next_table_id: int = 1) -> tuple[str, IdBlock | None]:
        """Return the service's id; `service_id` is the data directory's, None for a new one.

        The first shard sets the id, and gets the block of ids from its `next_table_id` on without a
        claim: the ids below belong to this shard, too. Raises `InvalidRequestError` for a data
        directory of another service.
        """
        proposed = service_id or uuid.uuid4().hex
        first_block = -(-next_table_id // BLOCK_IDS)
        content = {"service_id": proposed, "first_block": first_block}
        if self._chains.create(_SERVICE, content):
            return proposed, IdBlock(next_table_id, first_block * BLOCK_IDS)
        directory_id = str(self._service()["service_id"])
        if service_id not in (None, directory_id):
            raise InvalidRequestError(
                f"the data directory is of service {service_id}, but the journal's shards are of"
                f" service {directory_id}: give it a --journal of its own"
            )
        return directory_id, None

    def _service(self) -> dict[str, Any]:
        content = self._chains.content(_SERVICE) or {}
        try:
            return {
                "service_id": str(content["service_id"]),
                "first_block": int(content["first_block"]),
            }
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptDataError("the directory in the store names no service") from error

    def claim_ids(self, *, above: int = 0) -> IdBlock:
        """Return unused ids above `above`, exclusively for this call."""
        numbers = [_block_number(key) for key in self._store.list(f"{_IDS}/")]
        block = max(int(self._service()["first_block"]), above // BLOCK_IDS + 1, *numbers, 0)
        for number in range(block, min(block + _RACES_MAX, _BLOCK_MAX)):
            if self._chains.create(f"{_IDS}/{number:08d}", {"shard": self.shard}):
                return IdBlock(number * BLOCK_IDS, (number + 1) * BLOCK_IDS)
        raise OverloadedError("too many shards claim ids at the same time; try again later")

    def last_id_elsewhere(self, path: TablePath, *, since: int) -> int:
        """Return an upper bound of the ids of a name's tables in other shards, or 0."""
        last = 0
        for key in self._store.list(f"{_IDS}/"):
            number = _block_number(key)
            if number * BLOCK_IDS < since:
                continue
            content = self._chains.content(key) or {}
            shard = str(content.get("shard"))
            check_shard_name(shard)
            if shard != self.shard and self._chains.content(f"{_HELD}/{shard}/{path}") is not None:
                last = max(last, (number + 1) * BLOCK_IDS - 1)
        return last

    # -- tables ----------------------------------------------------------------------------------

    def entry(self, path: TablePath) -> NameEntry:
        """Return a name's current entry."""
        return self._entry(path, self._chains.head(_table(path)))

    def entries(self, database: str | None = None) -> dict[TablePath, NameEntry]:
        """Return every name except the free ones, of one database or of all."""
        prefix = f"{_TABLES}/" if database is None else f"{_TABLES}/{database}/"
        entries = self._entries_of(self._chains.heads(prefix, is_wanted=_is_of_table))
        return {path: entry for path, entry in entries.items() if entry.state is not NameState.FREE}

    def names(self) -> set[TablePath]:
        """Return every held or assigned name and some free ones: one listing, and no reads."""
        paths = (_path_of(name) for name in self._chains.names(f"{_TABLES}/"))
        return {path for path in paths if path is not None}

    def readable_entries(self) -> dict[TablePath, NameEntry]:
        """Return `entries` without damaged names: for display, not for decisions."""
        heads = self._chains.heads(
            f"{_TABLES}/", is_wanted=_is_of_table, passed_over=_warn_of_damage
        )
        entries = {}
        for name, version in heads.items():
            try:
                entries.update(self._entries_of({name: version}))
            except CorruptDataError as error:
                _warn_of_damage(error)
        return {path: entry for path, entry in entries.items() if entry.state is not NameState.FREE}

    def _entries_of(self, heads: Mapping[str, Version]) -> dict[TablePath, NameEntry]:
        paths = {name: path for name in heads if (path := _path_of(name)) is not None}
        return {path: self._entry(path, heads[name]) for name, path in paths.items()}

    def assign(self, path: TablePath, shard: str, *, is_live: Callable[[str], bool]) -> str:
        """Return the shard for a new table of this name: an earlier assignment, else `shard`.

        An assignment to a dead shard is replaced. Raises `TableExistsError` if the name is held.
        """

        def decide(entry: NameEntry) -> NameEntry | None:
            if entry.state is NameState.HELD:
                raise _exists(path, entry)
            if entry.state is NameState.ASSIGNED and (entry.shard == shard or is_live(entry.shard)):
                return None
            return NameEntry(state=NameState.ASSIGNED, shard=shard)

        return self._change(path, decide).shard

    def check_free(self, path: TablePath) -> None:
        """Raise if another shard has a table of this name, or of one that differs in case alone."""
        entry = self.entry(path)
        if entry.state is NameState.HELD and entry.shard != self.shard:
            raise _exists(path, entry)
        same_letters = twins(path, self.names())
        held = [twin for twin in same_letters if self.entry(twin).state is NameState.HELD]
        check_no_twin("table", path, held)

    def hold(self, path: TablePath, table_id: int) -> None:
        """Hold a name for this shard's table `table_id`; the shard must have no table of this name.

        Raises `TableExistsError` if another shard has the name, and `DatabaseNotFoundError` if the
        database was dropped in the meantime.
        """
        try:
            self._hold(path, table_id)
            # Checked after the hold: dropping a database reads its names after marking the drop.
            if self.has_database(path.database, besides=path):
                return
        except UnknownOutcomeError as error:
            # A superfluous name is harmless: this shard clears it.
            raise UnavailableError(
                f"the directory of shards did not answer, so table '{path}' was not created:"
                f" {error.message}"
            ) from error
        self.release(path, table_id)
        raise DatabaseNotFoundError(f"database '{path.database}' was just dropped")

    def _hold(self, path: TablePath, table_id: int) -> None:
        held_entry = self._held(table_id)

        def decide(entry: NameEntry) -> NameEntry | None:
            if entry.state is not NameState.FREE and entry.shard != self.shard:
                raise _exists(path, entry)
            return None if entry == held_entry else held_entry

        # Before the name is held: a start of this shard reads only these names.
        self._chains.create(f"{_HELD}/{self.shard}/{path}", {})
        self._change(path, decide)

    def release(self, path: TablePath, table_id: int) -> None:
        """Free a name held by this shard for the removed table `table_id`."""
        held_entry = self._held(table_id)
        self._change(path, lambda entry: FREE if entry == held_entry else None)

    def clear(
        self,
        tables: Mapping[TablePath, int],
        *,
        arriving: Container[int] = (),
        confirm: Callable[[], object],
    ) -> dict[TablePath, str]:
        """Make this shard's names match its tables; for its start.

        Names under the ids `arriving` stay: these tables may be moving here. `confirm` returns only
        if this process owned the shard until the call. A successor changes a name by writing the
        next version, so a stale process cannot release a name of its successor.

        Returns a sentence for each table whose name another shard has. Reads only names held by
        this shard now or earlier, because many shards start at once when a zone fails.
        """
        ever_held = f"{_HELD}/{self.shard}/"
        keys = self._store.list(ever_held)
        names = {_table(TablePath.parse(key.removeprefix(ever_held))) for key in keys}
        names |= {_table(path) for path in tables}
        heads = self._chains.heads(f"{_TABLES}/", is_wanted=names.__contains__)
        entries = self._entries_of(heads)
        refusals = {}
        for path, table_id in sorted(tables.items()):
            if entries.get(path) == self._held(table_id):
                continue
            try:
                self._hold(path, table_id)
            except TableExistsError as error:
                refusals[path] = error.message
        stale_names = [
            _table(path)
            for path, entry in entries.items()
            if entry.shard == self.shard and entry.state is NameState.HELD
            if path not in tables and entry.table_id not in arriving
        ]
        if stale_names:
            confirm()
        for name in stale_names:
            self._chains.advance(name, heads[name], FREE.to_json())
        return refusals

    # -- moves: from this shard, or to it ---------------------------------------------------------

    def begin_move(self, path: TablePath, table_id: int, *, target: str) -> MoveTicket:
        """Return the ticket for a move of this shard's table; this shard still holds the name."""
        try:
            self._hold(path, table_id)
        except TableExistsError as error:
            # The list was stale: this shard has the table.
            raise UnavailableError(f"{error.message}; try again later") from error
        version = self._chains.head(_table(path))
        if self._entry(path, version) != self._held(table_id):
            raise UnavailableError(f"the name of table '{path}' was just changed; try again later")
        return MoveTicket(
            move_id=uuid.uuid4().hex,
            path=path,
            table_id=table_id,
            source=self.shard,
            target=target,
            version=version.number,
        )

    def expect_move(self, ticket: MoveTicket) -> None:
        """Note a possible arrival, so that this shard's start checks the name.

        Raises `UnavailableError` unless the source holds the name.
        """
        entry = self.entry(ticket.path)
        if (entry.shard, entry.table_id) != (ticket.source, ticket.table_id):
            raise UnavailableError(
                f"table '{ticket.path}' is not that of shard '{ticket.source}' which was to come"
            )
        self._chains.create(f"{_HELD}/{self.shard}/{ticket.path}", {})

    def decide_move(self, ticket: MoveTicket) -> str:
        """Give the name to the target, unless the move was decided; return the shard with the name.

        After an error either shard may have the name, until `end_move` returns.
        """
        return self._decide(ticket, ticket.target)

    def end_move(self, ticket: MoveTicket) -> str:
        """Keep the name, unless the move was decided; return the shard with the name, for good."""
        return self._decide(ticket, ticket.source)

    def _decide(self, ticket: MoveTicket, shard: str) -> str:
        assert self.shard == ticket.source, ticket
        entry = NameEntry(state=NameState.HELD, shard=shard, table_id=ticket.table_id)
        # Only one of all the source's processes can create this version.
        seen = Version(ticket.version, None)
        content = {**entry.to_json(), "move": ticket.move_id}
        self._chains.advance(_table(ticket.path), seen, content)
        decided = self.decided(ticket)
        assert decided is not None, ticket
        return decided

    def decided(self, ticket: MoveTicket) -> str | None:
        """Return the shard with the table after this move; None while the move is undecided."""
        key = _deciding(ticket)
        content = self._chains.content(key)
        if content is None:
            return None
        entry = NameEntry.from_json(content, where=f"{key} in the store")
        moved = NameEntry(state=NameState.HELD, shard=ticket.target, table_id=ticket.table_id)
        # Compared by the move's id: an earlier move may have led to the same entry.
        is_moved = entry == moved and content.get("move") == ticket.move_id
        return ticket.target if is_moved else ticket.source

    def _held(self, table_id: int) -> NameEntry:
        return NameEntry(state=NameState.HELD, shard=self.shard, table_id=table_id)

    def _change(
        self, path: TablePath, decide: Callable[[NameEntry], NameEntry | None]
    ) -> NameEntry:
        """Replace a name's entry by `decide(entry)`; None keeps the entry. Return the entry."""
        name, at_least = _table(path), 0
        for _ in range(_RACES_MAX):
            version = self._chains.head(name, at_least=at_least)
            entry = self._entry(path, version)
            new_entry = decide(entry)
            if new_entry is None:
                return entry
            if self._chains.advance(name, version, new_entry.to_json()) is not None:
                return new_entry
            at_least = version.number + 1
        raise OverloadedError(f"table name '{path}' changes all the time; try again later")

    def _entry(self, path: TablePath, version: Version) -> NameEntry:
        if version.content is None:
            return FREE
        return NameEntry.from_json(version.content, where=f"{_table(path)} in the store")

    # -- databases -------------------------------------------------------------------------------

    def databases(self) -> set[str]:
        """Return the names of all databases; a table makes its database exist."""
        heads = self._chains.heads(f"{_DATABASES}/", passed_over=_warn_of_damage)
        names = {name.rpartition("/")[2] for name, version in heads.items() if _is_there(version)}
        with_tables = {
            path.database
            for path, entry in self.readable_entries().items()
            if entry.state is NameState.HELD
        }
        return {DEFAULT_DATABASE, *names, *with_tables}

    def has_database(self, name: str, *, besides: TablePath | None = None) -> bool:
        """Whether a database exists: created, or with a table in it other than `besides`."""
        if name == DEFAULT_DATABASE or _is_there(self._chains.head(_database(name))):
            return True
        return any(
            path != besides and entry.state is NameState.HELD
            for path, entry in self.entries(name).items()
        )

    def create_database(self, name: str) -> None:
        """Create a database; raises `DatabaseExistsError`."""
        for _ in range(_RACES_MAX):
            seen = self._chains.head(_database(name))
            if name == DEFAULT_DATABASE or _is_there(seen):
                raise DatabaseExistsError(f"database '{name}' already exists")
            if self._chains.advance(_database(name), seen, {"exists": True}) is not None:
                return
        raise OverloadedError(f"database '{name}' changes all the time; try again later")

    def enter_database(self, name: str) -> None:
        """Register a data directory's database."""
        try:
            self.create_database(name)
        except DatabaseExistsError:
            return

    def drop_database(self, name: str) -> None:
        """Drop a database without tables; raises `DatabaseNotEmptyError`.

        The database is marked as dropped before its tables are read. A shard holding a new name
        checks the database afterwards, so a race is always detected.
        """
        seen = self._chains.head(_database(name))
        if not _is_there(seen):
            raise DatabaseNotFoundError(f"database '{name}' does not exist")
        dropped = self._chains.advance(_database(name), seen, {"exists": False})
        if dropped is None:
            raise DatabaseNotFoundError(f"database '{name}' was just dropped by another request")
        try:
            remaining_tables = [
                path for path, entry in self.entries(name).items() if entry.state is NameState.HELD
            ]
        except StreamhouseError:
            self._chains.advance(_database(name), dropped, {"exists": True})
            raise
        if remaining_tables:
            self._chains.advance(_database(name), dropped, {"exists": True})
            raise DatabaseNotEmptyError(
                f"database '{name}' still has {len(remaining_tables)} tables, such as"
                f" '{remaining_tables[0]}'; drop them first"
            )

    # -- shards ----------------------------------------------------------------------------------

    def record(self, record: ShardRecord) -> None:
        """Publish this shard's load and table count."""
        key = f"{_SHARDS}/{self.shard}"
        self._store.replace(key, seal(key, record.to_json(), nonce=""))

    def records(self) -> dict[str, ShardRecord]:
        """Return the last record of every shard."""
        records = {}
        keys = sorted(self._store.list(f"{_SHARDS}/"))
        for key, data in zip(keys, self._each(self._store.get, keys), strict=True):
            try:
                record = None if data is None else _record(unseal(key, data), where=key)
            except CorruptDataError as error:
                # The owner writes a new record soon, and no decision depends on it.
                _logger.warning("event=shard_record_damaged why=%r", error.message)
                continue
            if record is not None and key == f"{_SHARDS}/{record.shard}":
                records[record.shard] = record
        return records


def _table(path: TablePath) -> str:
    return f"{_TABLES}/{path.database}/{path.table}"


def _warn_of_damage(error: CorruptDataError) -> None:
    _logger.warning("event=name_damaged why=%r advice='check --journal says more'", error.message)


def _deciding(ticket: MoveTicket) -> str:
    return version_key(_table(ticket.path), ticket.version + 1)


def _path_of(name: str) -> TablePath | None:
    """Return the table of a name, None for a foreign object."""
    try:
        return TablePath(*name.split("/")[1:])
    except (TypeError, InvalidNameError):
        _logger.warning("event=foreign_object key=%.200r advice='no name: ignored'", name)
        return None


def _is_of_table(name: str) -> bool:
    return _path_of(name) is not None


def _database(name: str) -> str:
    return f"{_DATABASES}/{name}"


def _is_there(version: Version) -> bool:
    return version.content is not None and version.content.get("exists") is True


def _block_number(key: str) -> int:
    digits = key.rpartition("/")[2]
    return int(digits) + 1 if digits.isascii() and digits.isdecimal() else 0


def _exists(path: TablePath, entry: NameEntry) -> TableExistsError:
    return TableExistsError(f"table '{path}' already exists, in shard '{entry.shard}'")


def _record(content: Mapping[str, Any], *, where: str) -> ShardRecord:
    try:
        record = ShardRecord(
            shard=str(content["shard"]),
            load_millicores=int(content["load_millicores"]),
            table_count=int(content["table_count"]),
        )
        check_shard_name(record.shard)
    except (KeyError, TypeError, ValueError, OverflowError, StreamhouseError) as error:
        raise CorruptDataError(
            f"{where} in the store is no valid record of a shard: {error!r}"
        ) from error
    return record


def known_service_id(store: DirectoryObjects) -> str | None:
    """Return the id of the service in this store; None before its first shard joined."""
    data = store.get(_SERVICE)
    return None if data is None else str(unseal(_SERVICE, data)["service_id"])
