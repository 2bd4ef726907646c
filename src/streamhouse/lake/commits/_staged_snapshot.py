"""A staged snapshot: manifests and manifest list are written, the commit is to come.

Like pyiceberg's own producers, with additions for rounds and compactions: a snapshot may add and
remove data files and position delete files together, the caller names its operation, rewritten data
may keep its sequence number, and the base snapshot is asserted and never silently replaced by a
newer snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.manifest import DataFile, ManifestContent, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    UpdateMetrics,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)

from streamhouse.lake._landing import StagedChange
from streamhouse.lake.commits._new_manifests import SnapshotManifests

__all__ = ["Operation", "SnapshotChanges", "stage_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChanges:
    """The changes of a snapshot to its parent's files.

    `added` and `removed` hold data files and position delete files alike; each entry has its kind.
    The added data files get `data_sequence_number`: rewritten rows count as old as their originals;
    None means the snapshot's own. The files at `made_for_it` are of no use without the commit.
    """

    operation: Operation
    added: Sequence[DataFile] = ()
    removed: Sequence[DataFile] = ()
    data_sequence_number: int | None = None
    made_for_it: Sequence[str] = ()


def stage_snapshot(
    table: Table,
    changes: SnapshotChanges,
    *,
    summary: Mapping[str, str],
    table_properties: Callable[[int], Mapping[str, str]] = lambda _: {},
) -> StagedChange:
    """Write the metadata of a snapshot with `changes` to the table's current snapshot.

    The commit asserts the table's identity and the current snapshot. It also sets
    `table_properties`, a function of the snapshot's sequence number.

    Raises `FencedError` when a file to remove is not live in the current snapshot.
    """
    metadata = table.metadata
    parent = metadata.snapshot_by_name(MAIN_BRANCH)
    parent_id = None if parent is None else parent.snapshot_id
    snapshot_id = metadata.new_snapshot_id()
    sequence_number = metadata.next_sequence_number()
    manifests = SnapshotManifests(table, snapshot_id=snapshot_id)
    added = manifests.of_added(changes.added, data_sequence_number=changes.data_sequence_number)
    parent_manifests = manifests.of_parent(parent, removed=changes.removed)
    all_manifests = [*added, *parent_manifests]
    written = manifests.write_list(
        all_manifests, parent_id=parent_id, sequence_number=sequence_number
    )
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": parent_id,
            "manifest-list": written.location,
            "sequence-number": sequence_number,
            "summary": _summary(metadata, changes, parent, summary, all_manifests),
            "schema-id": metadata.current_schema_id,
            "first-row-id": written.first_row_id,
            "added-rows": written.row_count,
        }
    )
    branch = {"snapshot-id": snapshot_id, "ref-name": MAIN_BRANCH, "type": "branch"}
    updates: tuple[TableUpdate, ...] = (
        AddSnapshotUpdate(snapshot=snapshot),
        SetSnapshotRefUpdate.model_validate(branch),
    )
    properties = dict(table_properties(sequence_number))
    if properties:
        updates += (SetPropertiesUpdate(updates=properties),)
    return StagedChange(
        snapshot_id=snapshot_id,
        parent_id=parent_id,
        sequence_number=sequence_number,
        updates=updates,
        requirements=(
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": parent_id}),
        ),
        metadata_paths=(*manifests.paths, *changes.made_for_it),
    )


class _SummaryCollector(SnapshotSummaryCollector):
    """Counts changed partitions by their values: as texts, days after the year 9999 have none."""

    def update_partition_metrics(
        self, partition_spec: PartitionSpec, file: DataFile, is_add_file: bool, schema: Schema
    ) -> None:
        del is_add_file, schema
        values = [file.partition[position] for position in range(len(file.partition))]
        # The summary only counts partitions.
        self.partition_metrics[f"{partition_spec.spec_id} {values}"] = UpdateMetrics()


def _summary(
    metadata: TableMetadata,
    changes: SnapshotChanges,
    parent: Snapshot | None,
    properties: Mapping[str, str],
    manifests: Sequence[ManifestFile],
) -> Summary:
    collector = _SummaryCollector()
    specs, schema = metadata.specs(), metadata.schema()
    for file in changes.added:
        collector.add_file(file, schema=schema, partition_spec=specs[file.spec_id])
    for file in changes.removed:
        collector.remove_file(file, schema=schema, partition_spec=specs[file.spec_id])
    # pyiceberg sums up any operation but `replace`, whose sums are no different.
    summed = update_snapshot_summaries(
        Summary(Operation.OVERWRITE, **collector.build(), **properties),
        None if parent is None or parent.summary is None else parent.summary,
    )
    return Summary(changes.operation, **{**summed.additional_properties, **_totals(manifests)})


def _totals(manifests: Sequence[ManifestFile]) -> dict[str, str]:
    """Return the sums that the manifests themselves have, whatever the parent's summary says.

    Other engines may leave sums out, and DuckDB 1.5 counts replaced deletion vectors on and on.
    """
    totals = {}
    for content, files, rows in (
        (ManifestContent.DATA, "total-data-files", "total-records"),
        (ManifestContent.DELETES, "total-delete-files", "total-position-deletes"),
    ):
        counted = [manifest for manifest in manifests if manifest.content == content]
        totals[files] = sum(
            (m.added_files_count or 0) + (m.existing_files_count or 0) for m in counted
        )
        totals[rows] = sum(
            (m.added_rows_count or 0) + (m.existing_rows_count or 0) for m in counted
        )
    return {name: str(total) for name, total in totals.items()}
