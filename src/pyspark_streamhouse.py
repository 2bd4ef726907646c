"""Registers the format `streamhouse` with Spark after a normal install.

Spark imports every top-level module called `pyspark_*` and registers the `DefaultSource` in each.
If a module raises an error, Spark forgets all modules. Therefore a failing import of the connector
is logged, and the connector left out; `streamhouse.register(spark)` tells the user the reason.
"""

from __future__ import annotations

import logging

__all__ = ["DefaultSource"]  # noqa: F822 - served by __getattr__

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module 'pyspark_streamhouse' has no attribute {name!r}")
    try:
        from streamhouse.connector.format.data_source import StreamhouseDataSource  # noqa: PLC0415 - Spark looks for data sources at every start
    except ImportError as error:
        _log.warning("Spark cannot use the format 'streamhouse': %s", error)
        raise AttributeError(f"the Streamhouse connector cannot be imported: {error}") from error
    return StreamhouseDataSource
