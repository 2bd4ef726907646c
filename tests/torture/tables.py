"""The tables of an era: what each has that the others have not, who writes to it, who judges it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol, runtime_checkable

from streamhouse.api.client import StreamhouseClient
from tests.torture.aging import AgingChecker
from tests.torture.aging_keys import AgingKeyChecker, AgingKeyLedger, AgingKeyWriter
from tests.torture.checkers import (
    KeyChecker,
    KeyTransactionChecker,
    LogChecker,
    SchemaChecker,
    TransactionChecker,
)
from tests.torture.held_positions import PositionHolder
from tests.torture.key_writers import (
    AddingWriter,
    KeyTransactionWriter,
    KeyWriter,
    LayoutChanger,
    SchemaChanger,
    VersionedWriter,
)
from tests.torture.ledger import AppendLedger, KeyLedger, SchemaLedger
from tests.torture.live import LiveChecker
from tests.torture.outside import (
    OutsideCompactor,
    OutsideDeleter,
    OutsideLedger,
    OutsideLogChecker,
)
from tests.torture.overwrites import (
    AgingOverwriteChecker,
    AgingOverwriter,
    OverwriteChecker,
    Overwriter,
)
from tests.torture.recreated import GenerationChecker, GenerationLedger, Recreator
from tests.torture.writers import (
    KEY_SCHEMA,
    LOG_SCHEMA,
    Appender,
    ImpatientAppender,
    TransactionWriter,
    Writer,
)

__all__ = ["BUCKETS", "Checker", "CutChecker", "Place", "create_tables", "places"]

BUCKETS: Final = 3

_NO_LAKE: Final = {"table.datalake.enabled": "false", "table.log.segment-bytes": "256kb"}
_LAKE: Final = {
    "table.datalake.freshness": "1s",
    "table.log.segment-bytes": "64kb",
    # Maintenance has something to do all the time.
    "table.datalake.snapshot.max-age": "2s",
    "table.datalake.snapshot.min-count": "3",
    "table.datalake.orphan.min-age": "1min",
}
_SHORT_LOG: Final = {**_LAKE, "table.log.ttl": "1s"}
# Every lake table that a table may have, each with rounds of its own.
_SIDE_LOG: Final = {**_SHORT_LOG, "table.datalake.batch-layout.sort": "writer, number"}
_SIDE_KEYS: Final = {
    **_SHORT_LOG,
    "table.datalake.changelog": "true",
    "table.datalake.batch-layout.partition": "bucket(2, version)",
    "table.datalake.batch-layout.sort": "zorder(key, version)",
}
_ADDING: Final = {"table.merge-engine": "aggregation", "fields.version.agg": "sum"}
_VERSIONED: Final = {
    "table.merge-engine": "versioned",
    "table.merge-engine.versioned.ver-column": "version",
}


# Where the log keeps all rows every one is seen before it has gone.
_TTLS_MS: Final = {
    "aging": 1_500,
    "aging_layout": 2_500,
    "aging_overwritten": 500,
    "aging_keys": 1_000,
    "aging_short_keys": 2_000,
}


def _aging(properties: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the properties of a table whose rows age; a cut is read while files go."""
    return {
        **properties,
        "table.datalake.ttl": f"{_TTLS_MS[name]}ms",
        "table.datalake.snapshot.max-age": "5s",
    }


class Checker(Protocol):
    """Judges one table."""

    table: str

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int: ...

    def check_lake(self, client: StreamhouseClient) -> None: ...

    def check_at_end(self, client: StreamhouseClient) -> None: ...


@runtime_checkable
class CutChecker(Checker, Protocol):
    """Judges one table also while it is written to."""

    def check_cut(self, client: StreamhouseClient) -> int: ...


class Place(NamedTuple):
    """Writers of one kind, `count` of them, for a table, with what they were told."""

    checker: Checker | None
    table: str
    writer: type[Writer]
    ledger: AppendLedger | KeyLedger | SchemaLedger | GenerationLedger
    count: int


_LOGS: Final[dict[str, Mapping[str, str]]] = {
    "log": _NO_LAKE,
    "recreated": {"table.datalake.freshness": "1s"},
    "outside_log": _SHORT_LOG,
    "lake_log": _SIDE_LOG,
    "transactions": _SHORT_LOG,
    # A cut is read over both tiers, while rounds replace the files.
    "overwritten": {**_SIDE_LOG, "table.datalake.snapshot.max-age": "30s"},
    "aging": _aging(_LAKE, "aging"),
    "aging_layout": _aging(_SIDE_LOG, "aging_layout"),
    "aging_overwritten": _aging(
        {**_LAKE, "table.datalake.batch-layout.sort": "number"}, "aging_overwritten"
    ),
}
_KEYS: Final[dict[str, Mapping[str, str]]] = {
    "keys": _NO_LAKE,
    "lake_keys": _SIDE_KEYS,
    "key_transactions": _LAKE,
    "outside_keys": _LAKE,
    "sums": {**_NO_LAKE, **_ADDING},
    "versioned": {**_LAKE, **_VERSIONED},
    "aging_keys": _aging({**_SIDE_KEYS, "table.log.ttl": "1d"}, "aging_keys"),
    "aging_short_keys": _aging(_SHORT_LOG, "aging_short_keys"),
}


def create_tables(client: StreamhouseClient) -> None:
    """Create all tables."""
    for name, properties in _LOGS.items():
        client.create_table(name, LOG_SCHEMA, bucket_count=BUCKETS, properties=properties)
    for name, properties in _KEYS.items():
        client.create_table(
            name, KEY_SCHEMA, primary_key=["key"], bucket_count=BUCKETS, properties=properties
        )


def places() -> Iterator[Place]:
    """Yield who writes where."""
    yield from _lasting_places()
    yield from _aging_places()
    yield from _outside_places()


def _outside_places() -> Iterator[Place]:
    """Yield who writes where, in the service and past it, to the tables of `outside.py`."""
    name, rows = "outside_log", OutsideLedger()
    yield Place(OutsideLogChecker(name, rows), name, Appender, rows, 1)
    yield Place(None, name, OutsideDeleter, rows, 1)
    yield Place(None, name, OutsideCompactor, rows, 1)
    name, keys = "outside_keys", KeyLedger()
    yield Place(KeyChecker(name, keys), name, KeyWriter, keys, 1)
    yield Place(None, name, OutsideDeleter, keys, 1)
    yield Place(None, name, OutsideCompactor, keys, 1)


def _lasting_places() -> Iterator[Place]:
    for name in ("log", "lake_log"):
        rows = AppendLedger()
        yield from _judged(LogChecker(name, rows), Appender, rows)
        yield Place(None, name, ImpatientAppender, rows, 1)
    for name in ("keys", "lake_keys"):
        keys = KeyLedger()
        yield from _judged(KeyChecker(name, keys), KeyWriter, keys)
    for name in ("lake_log", "lake_keys"):
        columns = SchemaLedger()
        yield Place(SchemaChecker(name, columns), name, SchemaChanger, columns, 1)
    rows = AppendLedger()
    yield from _judged(TransactionChecker("transactions", rows), TransactionWriter, rows)
    rows = AppendLedger()
    yield Place(OverwriteChecker("overwritten", rows), "overwritten", Overwriter, rows, 1)
    name, keys = "key_transactions", KeyLedger()
    yield from _judged(KeyTransactionChecker(name, keys), KeyTransactionWriter, keys)
    name, generations = "recreated", GenerationLedger()
    yield Place(GenerationChecker(name, generations), name, Recreator, generations, 1)
    yield Place(None, name, PositionHolder, generations, 2)
    for name, kind in (("sums", AddingWriter), ("versioned", VersionedWriter)):
        keys = KeyLedger()
        yield Place(KeyChecker(name, keys), name, kind, keys, 1)


def _judged(
    checker: LogChecker | TransactionChecker | KeyChecker,
    writer: type[Writer],
    ledger: AppendLedger | KeyLedger,
) -> Iterator[Place]:
    """Yield two writers of a table, judged by the log, and by the live table if it has a lake."""
    yield Place(checker, checker.table, writer, ledger, 2)
    if checker.table not in ("log", "keys"):
        yield Place(LiveChecker(checker), checker.table, writer, ledger, 0)


def _aging_places() -> Iterator[Place]:
    for name in ("aging", "aging_layout"):
        rows = AppendLedger()
        yield Place(AgingChecker(name, rows, _TTLS_MS[name]), name, Appender, rows, 1)
        yield Place(None, name, ImpatientAppender, rows, 1)
    name, columns = "aging_layout", SchemaLedger()
    yield Place(SchemaChecker(name, columns), name, LayoutChanger, columns, 1)
    name, rows = "aging_overwritten", AppendLedger()
    yield Place(AgingOverwriteChecker(name, rows, _TTLS_MS[name]), name, AgingOverwriter, rows, 1)
    for name in ("aging_keys", "aging_short_keys"):
        keys = AgingKeyLedger(ttl_us=_TTLS_MS[name] * 1_000)
        yield Place(AgingKeyChecker(name, keys), name, AgingKeyWriter, keys, 1)
