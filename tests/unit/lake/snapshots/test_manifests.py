"""Manifests read and written with kept readers and writers are those of stock pyiceberg."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.file import AvroFile
from pyiceberg.manifest import ManifestEntry
from pyiceberg.table import Table
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from streamhouse.core.errors import CorruptDataError
from streamhouse.lake.snapshots._manifests import (
    EntryFacts,
    check_manifest,
    entry_form,
    live_entries,
    live_rows,
    manifests_of,
)
from tests.support.held_step import around
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
    form = entry_form(table.spec().partition_type(table.schema()), 2)
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
        forms.append(entry_form(partition_type, 2))
        assert entry_form(partition_type, 2) is forms[-1]

    assert forms[0].avro_schema != forms[1].avro_schema


def _tiered(world: TieringWorld) -> Table:
    world.create_table("db.t", bucket_count=2)
    for start in (0, 3):
        world.service.append("db.t", 0, rows(start, 3))
        world.tier("db.t")
    return world.lake_table("db.t")


def test_a_manifest_that_was_exchanged_is_refused(world: TieringWorld) -> None:
    table = _tiered(world)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    newer, older = manifests_of(table.io, snapshot)
    content = table.io.new_input(older.manifest_path).open().read()
    with table.io.new_output(newer.manifest_path).create(overwrite=True) as file:
        file.write(content)

    with pytest.raises(CorruptDataError, match=f"manifest '{newer.manifest_path}' has snapshot"):
        live_entries(table.io, newer)


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([(1, 3), (1, 0)], "2 added files, its manifest list says 1"),
        ([(1, 3), (0, 1)], "1 existing files, its manifest list says 0"),
        ([(1, 3), (2, 1)], "1 deleted files, its manifest list says 0"),
        ([(1, 4)], "4 added rows, its manifest list says 3"),
        ([], "0 added files, its manifest list says 1"),
    ],
)
def test_a_manifest_of_other_counts_is_refused(
    world: TieringWorld, entries: list[tuple[int, int]], found: str
) -> None:
    table = _tiered(world)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifest = manifests_of(table.io, snapshot)[0]
    check_manifest(manifest, [EntryFacts(1, snapshot.snapshot_id, 3)])

    with pytest.raises(CorruptDataError, match=found):
        check_manifest(manifest, [EntryFacts(status, None, rows) for status, rows in entries])


def test_a_manifest_list_of_another_snapshot_is_refused(world: TieringWorld) -> None:
    table = _tiered(world)
    first, second = table.metadata.snapshots

    with pytest.raises(CorruptDataError, match=f"that of snapshot {first.snapshot_id}, not of"):
        manifests_of(table.io, second.model_copy(update={"manifest_list": first.manifest_list}))


def test_the_collector_runs_again_once_the_last_of_several_threads_has_decoded(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _tiered(world)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifest = manifests_of(table.io, snapshot)[0]
    enabled: list[bool] = []
    both_decode, first_is_done = threading.Barrier(2), threading.Event()

    def waiting_decoder_of(decoder_of: Any, avro_schema: str) -> Any:
        decode = decoder_of(avro_schema)

        def waiting(decoder: BinaryDecoder) -> Any:
            if both_decode.wait(timeout=60):
                first_is_done.wait(timeout=60)
                enabled.append(gc.isenabled())
            return decode(decoder)

        return waiting

    def read() -> int:
        found = live_rows(table.io, manifest)
        first_is_done.set()
        return len(found)

    around(monkeypatch, "rows-decoding", waiting_decoder_of)
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(read) for _ in range(2)]
        assert [found.result() for found in reads] == [1, 1]

    assert (enabled, gc.isenabled()) == ([False], True)
