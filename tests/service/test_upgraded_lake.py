"""A table goes from Iceberg's format version 2 to 3 while it is written, read and tiered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import InvalidSchemaError, UnsupportedError
from tests.support.live_tables import live_catalog
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

VERSION: str = "table.datalake.format-version"


def _lake(client: StreamhouseClient, path: str) -> Table:
    catalog = client.lake_catalog()
    return load_catalog(catalog.name, **catalog.properties).load_table(path)


def _by_duckdb(lake: Table, columns: str) -> list[tuple[Any, ...]]:
    place = lake.metadata_location.removeprefix("file://")
    with connect() as duckdb:
        query = f"SELECT {columns} FROM iceberg_scan('{place}') ORDER BY id"
        return duckdb.execute(query).fetchall()


def _rows(client: StreamhouseClient, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.read(path).sort_by("id").to_pylist()
    return found


def test_a_log_table_is_upgraded_in_place(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("t", "id BIGINT, v STRING")

        def append(first: int) -> None:
            client.append("t", [{"id": first, "v": "a"}, {"id": first + 1, "v": "b"}])
            tier_once(client)

        append(0)
        client.add_column("t", "old", "int", default=1)
        append(2)
        early = client.scan("t")
        read = next(early).num_rows
        client.alter_properties("t", updates={VERSION: "3"})
        append(4)
        client.add_column("t", "new", "string", default="none")
        append(6)

        lake = _lake(client, "default.t")
        assert lake.metadata.format_version == 3
        expected = [{"id": n, "v": "ab"[n % 2], "old": 1, "new": "none"} for n in range(8)]
        assert _rows(client, "t") == expected
        assert read + sum(batch.num_rows for batch in early) == 4
        # Version 3 has a place for the default of a column that it was added in.
        ours = lake.scan().to_arrow().sort_by("id").select(["id", "new"]).to_pylist()
        assert ours == [{"id": n, "new": "none"} for n in range(8)]
        by_duckdb = _by_duckdb(lake, "id, new, _row_id")
        assert [row[:2] for row in by_duckdb] == [(n, "none") for n in range(8)]
        assert len({row[2] for row in by_duckdb}) == 8

        with pytest.raises(UnsupportedError, match="stays: Iceberg has no way back"):
            client.alter_properties("t", updates={VERSION: "2"})
        with pytest.raises(UnsupportedError, match="stays: Iceberg has no way back"):
            client.alter_properties("t", updates={}, removals=[VERSION])


def test_a_column_that_version_3_has_itself_is_renamed_first(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("t", "id BIGINT, _row_id BIGINT")
        client.append("t", [{"id": 1, "_row_id": 7}])
        tier_once(client)

        with pytest.raises(InvalidSchemaError, match="rename column '_row_id'"):
            client.alter_properties("t", updates={VERSION: "3"})
        client.rename_column("t", "_row_id", "number")
        client.alter_properties("t", updates={VERSION: "3"})
        with pytest.raises(InvalidSchemaError, match="rename column '_ROW_ID'"):
            client.add_column("t", "_ROW_ID", "bigint")

        tier_once(client)
        assert client.read("t").to_pylist() == [{"id": 1, "number": 7}]


@pytest.mark.parametrize(
    ("data_type", "default"),
    [
        ("int", 7),
        ("smallint", -3),
        ("bigint", 2**60),
        ("float", 0.1),
        ("double", 0.1),
        ("decimal(9,2)", "1.50"),
        ("boolean", False),
        ("string", "it's"),
        ("binary", b"\x00\xff"),
        ("date", "2026-01-02"),
        ("timestamp", "2026-01-02T03:04:05.000006Z"),
        ("timestamp_ntz", "2026-01-02T03:04:05"),
    ],
)
def test_other_engines_read_defaults_of_every_type(
    service: ServiceProcess, data_type: str, default: Any
) -> None:
    with StreamhouseClient(service.endpoint) as client:
        _check_default(client, data_type, default)


def _check_default(client: StreamhouseClient, data_type: str, default: Any) -> None:
    path = f"default.of_{data_type[:7].replace('(', '_')}_{len(data_type)}"
    client.create_table(path, "id BIGINT", properties={VERSION: "3"})
    client.append(path, [{"id": 1}])
    tier_once(client, path)
    client.add_column(path, "c", data_type, default=default)
    client.append(path, pa.table({"id": [2], "c": pa.nulls(1)}))
    tier_once(client, path)

    lake = _lake(client, path)
    ours = _rows(client, path)
    assert ours[0]["c"] is not None
    assert ours[1]["c"] is None
    scanned = lake.scan().to_arrow().sort_by("id").select(["id", "c"]).to_pylist()
    assert scanned == ours
    (first, second) = _by_duckdb(lake, "id, c")
    assert (str(first[1]), second[1]) == (str(ours[0]["c"]), None)


def test_an_updated_row_has_its_id_in_a_live_table(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(
            "t", "id BIGINT, v STRING", primary_key=["id"], properties={VERSION: "3"}
        )
        live = live_catalog(service.endpoint)
        client.upsert("t", [{"id": n, "v": "a"} for n in range(4)])
        tier_once(client)
        ids = _by_duckdb(_lake(client, "default.t"), "id, _row_id")

        for v in ("b", "c"):
            client.upsert("t", [{"id": 1, "v": v}, {"id": 4, "v": v}])
            fresh = _by_duckdb(live.load_table("default.t"), "id, _row_id, v")
            assert [row[:2] for row in fresh[:4]] == ids
            assert (fresh[1][2], len({row[1] for row in fresh})) == (v, 5)
        tier_once(client)
        assert _by_duckdb(_lake(client, "default.t"), "id, _row_id")[:4] == ids
