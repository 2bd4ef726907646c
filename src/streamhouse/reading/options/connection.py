"""The table and the service of a read or write, and this process's one client of the service.

Users load `database.table`, or `database.table$part` for one tier or a description of the table.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.client import (
    DEFAULT_ENDPOINT,
    ENDPOINT_VARIABLE,
    TOKEN_VARIABLE,
    StorageClient,
    with_ca_file,
    with_read_from,
)
from streamhouse.core.errors import InvalidNameError, InvalidRequestError, suggestion
from streamhouse.core.model.table import TablePath

__all__ = [
    "BUCKETS",
    "CHANGELOG",
    "CHANGES",
    "FILES",
    "HISTORY",
    "ICEBERG",
    "LAKE",
    "LOG",
    "METADATA_PARTS",
    "REJECTED",
    "SNAPSHOTS",
    "ConnectionOptions",
    "TableName",
    "client_for",
    "connection_options",
]

LAKE: Final = "lake"
LOG: Final = "log"
CHANGELOG: Final = "changelog"
CHANGES: Final = "changes"
"""The changelog in Spark's form."""
ICEBERG: Final = "iceberg"
SNAPSHOTS: Final = "snapshots"
BUCKETS: Final = "buckets"
REJECTED: Final = "rejected"
FILES: Final = "files"
HISTORY: Final = "history"
METADATA_PARTS: Final = (SNAPSHOTS, BUCKETS, FILES, HISTORY)
_PARTS: Final = (LAKE, LOG, CHANGELOG, CHANGES, ICEBERG, *METADATA_PARTS)

_lock: Final = threading.Lock()
_clients: Final[dict[tuple[int, str, str | None], StorageClient]] = {}


@dataclass(frozen=True, slots=True)
class TableName:
    """A table and a part of the table; an empty part is the union of both tiers.

    With part `iceberg` the name is of any table in the catalog.
    """

    path: TablePath
    part: str = ""

    @classmethod
    def parse(cls, text: str | TablePath) -> TableName:
        """Read `database.table` or `database.table$part`; `$rejected` is a table of its own."""
        if not isinstance(text, str):
            # What is no text either is refused there, with a sentence.
            return cls(TablePath.parse(text))
        table, dollar, part = text.strip().partition("$")
        if part == REJECTED:
            # A table of its own, by another name.
            return cls(TablePath.parse(text.strip()))
        if dollar and part not in _PARTS:
            raise InvalidNameError(
                f"table '{table}' has no part '${part}'{suggestion(part, list(_PARTS))}"
                f" (parts: {', '.join('$' + suffix for suffix in (*_PARTS, REJECTED))})"
            )
        return cls(TablePath.parse(table), part)

    @property
    def is_metadata(self) -> bool:
        """Whether the part describes the table instead of holding its rows."""
        return self.part in METADATA_PARTS

    @property
    def is_iceberg(self) -> bool:
        """Whether the table belongs to the Iceberg catalog, not to the service."""
        return self.part == ICEBERG

    def __str__(self) -> str:
        return f"{self.path}${self.part}" if self.part else str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Which service, and the table there."""

    name: TableName
    endpoint: str
    token: str | None

    def __repr__(self) -> str:
        # A Spark plan or log shows this; the token never.
        return f"ConnectionOptions(name='{self.name}', endpoint={self.endpoint!r})"


def connection_options(options: Mapping[str, str]) -> ConnectionOptions:
    """Read which table of which service is meant."""
    by_key = {str(key).lower(): value for key, value in options.items()}
    path, table = by_key.get("path"), by_key.get("table")
    if by_key.get("paths"):
        raise InvalidRequestError(
            f"load one table at a time, not {by_key['paths']}; combine the rows of several loads"
        )
    name = table or path
    if not name:
        raise InvalidRequestError("no table given: call load('database.table')")
    endpoint = by_key.get("endpoint") or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
    ca_file, read_from = by_key.get("tls.ca"), by_key.get("read.from")
    if ca_file:
        endpoint = with_ca_file(endpoint, ca_file)
    return ConnectionOptions(
        name=TableName.parse(name),
        # Everything that travels to executors has the endpoint, so the endpoint has its settings.
        endpoint=with_read_from(endpoint, read_from) if read_from else endpoint,
        token=by_key.get("token") or os.environ.get(TOKEN_VARIABLE) or None,
    )


def client_for(endpoint: str, token: str | None) -> StorageClient:
    """Return this process's client of the service: Spark reuses its workers, so it stays open."""
    # Spark forks its workers: a connection must never be used by two processes.
    key = (os.getpid(), endpoint, token)
    with _lock:
        if key not in _clients:
            _clients[key] = StorageClient(endpoint, token=token)
        return _clients[key]
