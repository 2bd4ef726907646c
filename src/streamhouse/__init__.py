"""Streamhouse: a streaming lakehouse for PySpark.

The public names are here; each is loaded on first use, so that `import streamhouse` costs a few
milliseconds and brings in none of Spark, Iceberg or the storage service. A name that needs an extra
(`streamhouse.extras`) which is not installed raises an `ImportError` that says what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from streamhouse.extras import extra_of, require

if TYPE_CHECKING:
    from streamhouse.async_client import AsyncStreamhouseClient
    from streamhouse.client import StreamhouseClient
    from streamhouse.connector import cdc
    from streamhouse.connector.changes.table import Table
    from streamhouse.connector.format.registration import attach, register
    from streamhouse.connector.lookup.lookup_join import lookup_join, register_lookup
    from streamhouse.connector.query.sql_query import sql
    from streamhouse.connector.query.table_read import read
    from streamhouse.connector.stream.stream_lag import lag
    from streamhouse.storage_service.client.producer import Producer

__version__: Final = "0.1.0"

# Public name -> the module that defines it, or that it is.
_HOMES: Final = {
    "AsyncStreamhouseClient": "streamhouse.async_client",
    "Producer": "streamhouse.storage_service.client.producer",
    "StreamhouseClient": "streamhouse.client",
    "Table": "streamhouse.connector.changes.table",
    "attach": "streamhouse.connector.format.registration",
    "cdc": "streamhouse.connector.cdc",
    "lag": "streamhouse.connector.stream.stream_lag",
    "lookup_join": "streamhouse.connector.lookup.lookup_join",
    "register_lookup": "streamhouse.connector.lookup.lookup_join",
    "read": "streamhouse.connector.query.table_read",
    "register": "streamhouse.connector.format.registration",
    "sql": "streamhouse.connector.query.sql_query",
}

__all__ = [
    "AsyncStreamhouseClient",
    "Producer",
    "StreamhouseClient",
    "Table",
    "__version__",
    "attach",
    "cdc",
    "lag",
    "lookup_join",
    "read",
    "register",
    "register_lookup",
    "sql",
]

# Public names that are modules themselves.
_MODULES: Final = frozenset({"cdc"})


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamhouse' has no attribute {name!r}")
    require(extra_of(home), f"streamhouse.{name}")
    module = importlib.import_module(home)
    value: object = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
