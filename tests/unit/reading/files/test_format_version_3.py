"""Columns of tables of format version 3: defaults, row lineage, and types that are refused."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import ValidationError
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import StaticTable
from pyiceberg.typedef import Record

from streamhouse.core.errors import UnsupportedError
from tests.support.iceberg_world import IcebergWorld, numbered
from tests.support.v3_tables import upgraded

_UTC = datetime.UTC
DEFAULTS: dict[str, tuple[str, Any, Any]] = {
    "truth": ("boolean", True, True),
    "small": ("int", 7, 7),
    "large": ("long", -(2**62), -(2**62)),
    "narrow": ("float", 1.5, 1.5),
    "wide": ("double", 0.1, 0.1),
    "price": ("decimal(9, 2)", "14.20", Decimal("14.20")),
    "day": ("date", "2024-02-03", datetime.date(2024, 2, 3)),
    "local": (
        "timestamp",
        "2024-02-03T04:05:06.000007",
        datetime.datetime(2024, 2, 3, 4, 5, 6, 7),
    ),
    "instant": (
        "timestamptz",
        "2024-02-03T04:05:06.000007+00:00",
        datetime.datetime(2024, 2, 3, 4, 5, 6, 7, tzinfo=_UTC),
    ),
    "text": ("string", "a 'quoted' ä", "a 'quoted' ä"),
    "bits": ("binary", "00ff", b"\x00\xff"),
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[IcebergWorld]:
    with IcebergWorld(tmp_path) as opened:
        opened.create(numbered(0, 0).schema)
        opened.append(numbered(0, 3))
        yield opened


def _upgrade(world: IcebergWorld, *fields: dict[str, Any]) -> None:
    """Make it a table of format version 3 with more columns than its file."""
    (schema,) = json.loads(world.table().metadata.model_dump_json())["schemas"]
    schema["fields"] += [{"id": 3 + place, **field} for place, field in enumerate(fields)]
    upgraded(world.table(), schemas=[schema], **{"last-column-id": 50})


def test_rows_of_older_files_have_the_defaults(world: IcebergWorld) -> None:
    _upgrade(
        world,
        *(
            {"name": name, "type": iceberg_type, "required": False, "initial-default": value}
            for name, (iceberg_type, value, _) in DEFAULTS.items()
        ),
        {"name": "none", "type": "string", "required": False},
        {"name": "needed", "type": "long", "required": True, "initial-default": 5},
    )

    rows = world.read()
    expected = {name: value for name, (_, _, value) in DEFAULTS.items()}
    assert rows.drop_columns(["id", "name"]).to_pylist() == (
        3 * [expected | {"none": None, "needed": 5}]
    )
    judge = StaticTable.from_metadata(world.table().metadata_location).scan().to_arrow()
    assert rows["price"].to_pylist() == judge["price"].to_pylist()
    assert world.read(where="small = 7 AND day < DATE '2025-01-01'").num_rows == 3
    assert world.read(where="small = 8").num_rows == 0
    assert world.read(where="text IS NULL").num_rows == 0


def test_a_default_inside_a_column_is_refused(world: IcebergWorld) -> None:
    inner = {"id": 9, "name": "x", "type": "long", "required": False, "initial-default": 1}
    struct = {"type": "struct", "fields": [inner]}
    _upgrade(world, {"name": "s", "type": struct, "required": False})

    with pytest.raises(UnsupportedError, match=r"column 's' .* 'x' was added with a default"):
        world.read()
    assert world.read(columns="id").num_rows == 3


@pytest.mark.parametrize("iceberg_type", ["geometry", "geography", "unknown", "timestamp_ns"])
def test_a_column_of_a_new_type_is_refused_by_name(world: IcebergWorld, iceberg_type: str) -> None:
    _upgrade(world, {"name": "v", "type": iceberg_type, "required": False})

    with pytest.raises(UnsupportedError, match=f"'v' cannot be read: its type {iceberg_type}"):
        world.read()
    assert world.read(columns="id").num_rows == 3


@pytest.mark.parametrize(
    "iceberg_type", ["variant", "geometry(OGC:CRS84)", "geography(OGC:CRS84, vincenty)"]
)
def test_a_type_unknown_to_the_library_is_named(world: IcebergWorld, iceberg_type: str) -> None:
    with pytest.raises(ValidationError):
        _upgrade(world, {"name": "v", "type": iceberg_type, "required": False})

    name = iceberg_type.partition("(")[0]
    with pytest.raises(UnsupportedError, match=f"'shop.clicks': it has a column of type {name},"):
        world.read()


def _add(world: IcebergWorld, path: str, count: int) -> None:
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=count,
        file_size_in_bytes=Path(path.removeprefix("file://")).stat().st_size,
    )
    file.spec_id = 0
    with (
        world.table().transaction() as change,
        change.update_snapshot().fast_append() as snapshot,
    ):
        snapshot.append_data_file(file)


def test_lineage_in_a_file_is_not_shown(world: IcebergWorld) -> None:
    """Compactions of other engines write it out, under ids reserved by the specification."""
    lineage = [(b"2147483540", "_row_id"), (b"2147483539", "_last_updated_sequence_number")]
    ids = [(b"1", "id"), (b"2", "name"), *lineage]
    rows = numbered(3, 5)
    for _, name in lineage:
        rows = rows.append_column(name, pa.array([8, 9]))
    schema = pa.schema(
        [
            field.with_metadata({"PARQUET:field_id": field_id})
            for field, (field_id, _) in zip(rows.schema, ids, strict=True)
        ]
    )
    path = f"{world.table().location()}/data/compacted.parquet"
    pq.write_table(rows.cast(schema), path.removeprefix("file://"))
    _add(world, path, rows.num_rows)
    _upgrade(world)

    assert world.read().sort_by("id").to_pylist() == numbered(0, 5).to_pylist()
