"""Who may import whom: the contracts of setup.cfg, and the importers of each foreign engine."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from typing import Final

import pytest

from tests.architecture.source_files import library_files

# Engine -> the modules that may import it. What few modules import can be replaced by changing
# only these, and is not loaded by a process that never goes through it.
IMPORTERS: Final[dict[str, tuple[str, ...]]] = {
    "click": (
        "streamhouse.cli*",
        "streamhouse.tiering.worker.job",
        "streamhouse.tiering.spark_job",
    ),
    "crc32c": (
        "streamhouse.storage_service.ownership.journal.*",
        "streamhouse.storage_service.kafka.records.batch_header",
        "streamhouse.storage_service.kv._rocksdb_files",
        "streamhouse.storage_service.log.*",
        "streamhouse.storage_service.ownership.journal.*",
        "streamhouse.storage_service.ownership.shards.entries",
        "streamhouse.storage_service.ownership.shards.move_set",
        "streamhouse.storage_service.directory.state_file",
        "streamhouse.storage_service.server.readers._board",
    ),
    "duckdb": (
        "streamhouse.reading.duckdb._query_database",
        "streamhouse.reading.duckdb.duckdb_query",
    ),
    "fastapi": (
        "streamhouse.storage_service.server.*",
        "streamhouse.storage_service.kafka_door._kafka_routes",
    ),
    "httptools": ("streamhouse.client.http._http_connection",),
    "kio": (
        "streamhouse.storage_service.kafka.*",
        "streamhouse.storage_service.kafka_door.*",
    ),
    "obstore": ("streamhouse.storage_service.ownership.journal.store._s3_store",),
    "opentelemetry": ("streamhouse.core.traces.spans",),
    "prometheus_client": (
        "streamhouse.storage_service.server.*",
        "streamhouse.storage_service.ownership.roles.*",
    ),
    "pyiceberg": ("streamhouse.lake.*",),
    "pyiceberg_core": ("streamhouse.lake.files.partition_layout",),
    "pyspark": (
        "streamhouse.connector*",
        "streamhouse.tiering.spark_job",
        "streamhouse.tiering.worker._spark_runner",
    ),
    "pyruhvro": ("streamhouse.storage_service.kafka.*",),
    "rich": ("streamhouse.cli*", "streamhouse.tiering.worker._terminal_progress"),
    "rocksdict": ("streamhouse.storage_service.kv.rocksdb_store",),
    "sqlglot": (
        "streamhouse.reading.where.*",
        "streamhouse.connector.changes._side_names",
        "streamhouse.connector.query._query_text",
        "streamhouse.connector.query._text_needs",
    ),
    "sqlalchemy": ("streamhouse.lake.catalogs._sql_*",),
    "starlette": ("streamhouse.storage_service.server.*",),
    "uvicorn": ("streamhouse.storage_service.server.*", "streamhouse.cli.server_commands.serve"),
    "uvloop": ("streamhouse.storage_service.server.*", "streamhouse.cli.server_commands.serve"),
}


# What makes catalogs, file IOs and tables of what a table says: only behind the policy for them.
LAKE_USERS: Final[dict[str, tuple[str, ...]]] = {
    "load_catalog": (
        "streamhouse.lake.catalogs._sql_catalog",
        "streamhouse.lake.opened_table",
    ),
    "load_file_io": ("streamhouse.lake.*",),
    "load_location_provider": (),
    "StaticTable": (),
    "read_manifest_list": ("streamhouse.lake.*",),
}


# What some version of PySpark lacks, or has in another form: only one module knows.
VERSIONS: Final = "streamhouse.connector._spark_versions"
OF_SOME_VERSIONS: Final = (
    "pyspark.__version__",
    "pyspark.sql.datasource.DataSourceStreamArrowWriter",
    "pyspark.sql.functions.arrow_udf",
    "pyspark.sql.pandas.functions",
    "pyspark.sql.pandas.types",
    "pyspark.sql.streaming.datasource",
)


def test_one_module_knows_the_versions_of_pyspark() -> None:
    strangers = {
        (file.module, name)
        for file in library_files()
        for name in file.imports
        if file.module != VERSIONS
        and any(name == of_some or name.startswith(f"{of_some}.") for of_some in OF_SOME_VERSIONS)
    }

    assert not strangers, f"import these from {VERSIONS}"


@pytest.mark.parametrize("name", sorted(LAKE_USERS))
def test_lake_tables_are_opened_by_their_users_only(name: str) -> None:
    users = {
        file.module
        for file in library_files()
        for node in file.nodes
        if (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.Attribute) and node.attr == name)
    }

    strangers = {m for m in users if not any(fnmatchcase(m, p) for p in LAKE_USERS[name])}

    assert not strangers, f"{name} would pass by src/streamhouse/lake/catalogs/guarded_catalog.py"


@pytest.mark.parametrize("engine", sorted(IMPORTERS))
def test_an_engine_is_imported_by_its_importers_only(engine: str) -> None:
    importers = {
        file.module
        for file in library_files()
        if any(name == engine or name.startswith(f"{engine}.") for name in file.imports)
    }

    strangers = {
        name
        for name in importers
        if not any(fnmatchcase(name, pattern) for pattern in IMPORTERS[engine])
    }

    assert not strangers, f"{engine} may be imported by {IMPORTERS[engine]} only"
