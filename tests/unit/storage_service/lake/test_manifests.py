"""Manifests read and written with kept readers and writers are those of stock pyiceberg."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyiceberg.avro.file import AvroFile
from pyiceberg.manifest import ManifestEntry
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from streamhouse.storage_service.lake.manifests import entry_form, live_entries, manifests_of
from tests.support.tiering_world import TieringWorld, rows


def _plain(entry: ManifestEntry) -> tuple[Any, ...]:
    file = entry.data_file
    return (
        *(entry.status, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number),
        *(file.file_path, file.content, file.file_format, repr(file.partition), file.spec_id),
        *(file.record_count, file.file_size_in_bytes, file.lower_bounds, file.upper_bounds),
    )


@pytest.mark.parametrize("partitioned_by", [(), ("id",)])
def test_what_is_read_is_what_pyiceberg_reads(
    world: TieringWorld, partitioned_by: tuple[str, ...]
) -> None:
    world.create_table("db.t", bucket_count=2, partitioned_by=partitioned_by)
    for start in (0, 3):
        world.service.append("db.t", 0, rows(start, 3))
        world.service.append("db.t", 1, rows(start, 3))
        world.tier("db.t")
    table = world.lake_table("db.t")
    snapshot = table.current_snapshot()
    assert snapshot is not None

    found = manifests_of(table.io, snapshot)

    stock = snapshot.manifests(table.io)
    assert [(m.manifest_path, m.content, m.added_rows_count) for m in found] == [
        (m.manifest_path, m.content, m.added_rows_count) for m in stock
    ]
    for ours, theirs in zip(found, stock, strict=True):
        entries = live_entries(table.io, ours)
        assert entries
        assert [_plain(e) for e in entries] == [
            _plain(e) for e in theirs.fetch_manifest_entry(table.io, discard_deleted=True)
        ]
    # Written with the schema that pyiceberg would have written.
    form = entry_form(table.spec().partition_type(table.schema()))
    stock_schema = AvroSchemaConversion().iceberg_to_avro(form.schema, schema_name="manifest_entry")
    with AvroFile[Any](table.io.new_input(found[0].manifest_path)) as file:
        assert json.loads(file.header.meta["avro.schema"]) == stock_schema
        assert file.header.meta["content"] == "data"


def test_partition_types_do_not_share_a_form(world: TieringWorld) -> None:
    forms = []
    for path, columns in (("db.a", ()), ("db.b", ("id",))):
        world.create_table(path, partitioned_by=columns)
        world.service.append(path, 0, rows(0, 3))
        world.tier(path)
        table = world.lake_table(path)
        partition_type = table.spec().partition_type(table.schema())
        forms.append(entry_form(partition_type))
        assert entry_form(partition_type) is forms[-1]

    assert forms[0].avro_schema != forms[1].avro_schema
