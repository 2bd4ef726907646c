"""Spark's format `streamhouse`: batch and stream reads and writes of Streamhouse tables.

Importing this package loads neither Spark nor the lake library; each public name loads its module
on first use.
"""

from __future__ import annotations

import importlib
from typing import Final

# Public name -> the module that defines it.
_HOMES: Final = {
    "StreamhouseDataSource": "streamhouse.connector.format.data_source",
    "TableImport": "streamhouse.reading.imports.table_import",
    "attach": "streamhouse.connector.format.registration",
    "register": "streamhouse.connector.format.registration",
    "write_batch": "streamhouse.connector.format.registration",
}

__all__ = ["StreamhouseDataSource", "TableImport", "attach", "register", "write_batch"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamhouse.connector' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
