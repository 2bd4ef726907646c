"""The lake table as stock pyiceberg finds it: ids, spec, order, properties."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import LongType, StringType

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.lake_tables import IcebergLake
from tests.support.tiering_world import TieringWorld, rows

GOLDEN = Path(__file__).parents[3] / "golden" / "lake_table.json"

EVERY_TYPE = pa.schema(
    [
        pa.field("flag", pa.bool_(), nullable=False),
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("number", pa.int32()),
        ("big", pa.int64()),
        ("ratio", pa.float32()),
        ("amount", pa.float64()),
        ("price", pa.decimal128(9, 2)),
        ("huge", pa.decimal128(38, 10)),
        pa.field("name", pa.string(), metadata={"comment": "of the customer"}),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("ts_ntz", pa.timestamp("us")),
        ("tags", pa.list_(pa.field("element", pa.int16(), nullable=False))),
        ("counts", pa.map_(pa.string(), pa.int8())),
        ("place", pa.struct([("city", pa.string()), ("xy", pa.list_(pa.float64()))])),
    ]
)


def test_the_lake_table_is_laid_out_as_documented(world: TieringWorld) -> None:
    """Files of this layout lie in lakes: field ids of a table must never change."""
    info = world.create_table(
        schema=EVERY_TYPE,
        bucket_count=8,
        bucket_key=("name",),
        partitioned_by=("day(ts)", "truncate(4, name)"),
    )

    world.lake().open_or_create(info, LakeState())

    metadata = json.loads(world.lake_table().metadata.model_dump_json())
    found = {
        key: metadata[key]
        for key in (
            "format-version",
            "schemas",
            "current-schema-id",
            "partition-specs",
            "default-spec-id",
            "sort-orders",
            "default-sort-order-id",
            "properties",
        )
    }
    assert found == json.loads(GOLDEN.read_text())


def test_opening_again_finds_the_same_table(world: TieringWorld) -> None:
    info = world.create_table(schema=EVERY_TYPE)
    first = world.lake().open_or_create(info, LakeState())
    second = world.lake().open_or_create(info, LakeState())

    assert first.uuid == second.uuid
    assert first.file_schema.equals(second.file_schema, check_metadata=True)
    assert len(world.lake_table().metadata.schemas) == 1


def test_columns_specs_and_orders_of_other_engines_are_left_alone(world: TieringWorld) -> None:
    world.create_table(partitioned_by=("name",))
    world.service.append("db.t", 0, rows(0, 4))
    world.tier()
    lake_table = world.lake_table()
    with lake_table.update_schema() as schema:
        schema.add_column("note", StringType())
    with lake_table.update_spec() as spec:
        spec.remove_field("name")
    world.service.append("db.t", 0, rows(4, 4))

    world.tier()

    table = world.lake_table()
    assert table.scan(selected_fields=("id", "note")).to_arrow().sort_by("id").to_pylist() == [
        {"id": i, "note": None} for i in range(8)
    ]
    assert {task.file.spec_id for task in table.scan().plan_files()} == {0}
    assert table.scan(row_filter="name = 'n5'").to_arrow()["id"].to_pylist() == [5]


def test_a_column_that_another_engine_took_away_is_named(world: TieringWorld) -> None:
    world.create_table()
    world.service.append("db.t", 0, rows(0, 4))
    world.tier()
    with world.lake_table().update_schema(allow_incompatible_changes=True) as schema:
        schema.delete_column("name")
    world.service.append("db.t", 0, rows(4, 4))

    with pytest.raises(UnsupportedError, match="field 2 must be 'name' string, but is missing"):
        world.tier()


def test_a_column_that_another_engine_widened_is_named(world: TieringWorld) -> None:
    world.create_table(schema=pa.schema([("n", pa.int32())]))
    world.service.append("db.t", 0, pa.record_batch({"n": pa.array([1], pa.int32())}))
    world.tier()
    with world.lake_table().update_schema() as schema:
        schema.update_column("n", LongType())
    world.service.append("db.t", 0, pa.record_batch({"n": pa.array([2], pa.int32())}))

    with pytest.raises(UnsupportedError, match="field 1 must be 'n' int, but is 'n' long"):
        world.tier()


def test_workers_that_create_the_table_at_once_share_one(world: TieringWorld) -> None:
    for number in range(5):
        info = world.create_table(f"db{number}.t", schema=EVERY_TYPE)
        at_once = threading.Barrier(3)

        def create(lake: IcebergLake, info: TableInfo = info, ready: Any = at_once) -> str:
            ready.wait(60)
            return lake.open_or_create(info, LakeState()).uuid

        with ThreadPoolExecutor(3) as pool:
            uuids = list(pool.map(create, [world.lake() for _ in range(3)]))

        assert len(set(uuids)) == 1
