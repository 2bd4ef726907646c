"""Rows merged by any engine reach the lake as the table has them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.key_table_world import KeyTableWorld

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("version", pa.int64()),
        pa.field("text", pa.string()),
    ]
)
ENGINES: dict[str, dict[str, str]] = {
    "last_row": {},
    "first_row": {},
    "versioned": {"table.merge-engine.versioned.ver-column": "version"},
    "aggregation": {"fields.version.agg": "sum", "fields.text.agg": "listagg"},
}


@pytest.mark.parametrize("image", ["full", "after"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_lake_and_the_full_history_are_the_model(
    key_world: KeyTableWorld, engine: str, image: str
) -> None:
    key_world.create_key_table(
        SCHEMA,
        bucket_count=2,
        partitioned_by=["truncate(1, text)"],
        properties={
            "table.merge-engine": engine,
            "table.changelog.image": image,
            "table.datalake.changelog": "true",
            **ENGINES[engine],
        },
    )
    for number in range(5):
        key_world.upsert(
            *(
                # Versions go up and down, texts move rows between partitions.
                {"id": key, "version": (key * 7 + number * 5) % 11, "text": f"{number % 3}{key}"}
                for key in range(number, number + 9)
            )
        )
        key_world.change(
            [("upsert", {"id": key, "version": 6}) for key in range(3)], ("id", "version")
        )
        key_world.delete(
            *({"id": key, "version": None, "text": None} for key in range(number, 9, 4))
        )
        key_world.catch_up()
        assert key_world.in_lake() == key_world.live
        assert key_world.history() == key_world.changes
    assert key_world.live
