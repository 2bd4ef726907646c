"""Who may import whom: the contracts of setup.cfg, and one door for each foreign engine."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.source_files import ROOT, library_files

# Engine -> the modules that may import it. What stands behind a door can be replaced by changing
# only these, and is not loaded by a process that never goes through it.
DOORS: Final[dict[str, tuple[str, ...]]] = {
    "click": (
        "streamhouse.cli*",
        "streamhouse.tiering.job",
        "streamhouse.tiering.spark_job",
    ),
    "crc32c": (
        "streamhouse.storage_service.log.*",
        "streamhouse.storage_service.tablet.sealed_json",
    ),
    "fastapi": ("streamhouse.storage_service.server.*",),
    "prometheus_client": ("streamhouse.storage_service.server.*",),
    "pyiceberg": (
        "streamhouse.tiering.iceberg_*",
        "streamhouse.connector.lake_*",
        "streamhouse.connector.predicate_iceberg",
        "streamhouse.storage_service.lake.*",
        "streamhouse.storage_service.rest_catalog.*",
    ),
    "pyiceberg_core": (
        "streamhouse.storage_service.model.bucketing",
        "streamhouse.tiering.partition_layout",
    ),
    "pyspark": ("streamhouse.connector*", "streamhouse.tiering.spark_*"),
    "rich": ("streamhouse.cli*", "streamhouse.tiering.progress"),
    "rocksdict": ("streamhouse.storage_service.kv.rocksdb_store",),
    "sqlglot": ("streamhouse.connector.predicate*",),
    "sqlalchemy": ("streamhouse.storage_service.rest_catalog.sql_*",),
    "starlette": ("streamhouse.storage_service.server.*",),
    "urllib3": ("streamhouse.storage_service.client.*",),
    "uvicorn": ("streamhouse.storage_service.server.*", "streamhouse.cli.serve"),
    "uvloop": ("streamhouse.storage_service.server.*", "streamhouse.cli.serve"),
}


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run(
        # Its cache forgets that a module which was missing has appeared.
        [str(lint_imports), "--no-logo", "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine", sorted(DOORS))
def test_an_engine_is_imported_through_its_door_only(engine: str) -> None:
    importers = {
        file.module
        for file in library_files()
        if any(name == engine or name.startswith(f"{engine}.") for name in file.imports)
    }

    strangers = {
        name
        for name in importers
        if not any(fnmatchcase(name, pattern) for pattern in DOORS[engine])
    }

    assert not strangers, f"{engine} may be imported by {DOORS[engine]} only"
