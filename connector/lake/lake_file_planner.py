"""Which files of a lake snapshot a read needs, from its manifests; on the driver only.

What manifests say is pruned in lake_pruning.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from streamhouse.connector.lake.lake_manifests import DeleteIndex, data_files, delete_files
from streamhouse.connector.lake.lake_pruning import (
    LakeQuery,
    ManifestFiles,
    SystemFields,
    estimated_bytes,
    select_files,
)
from streamhouse.connector.scan.scan import DeleteFile, LakeFile
from streamhouse.connector.where.iceberg_expression import to_iceberg_expression
from streamhouse.connector.where.predicate import Predicate
from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.lake.snapshots.manifests import manifests_of
from streamhouse.storage_service.lake.snapshots.partition_filter import PartitionTest
from streamhouse.storage_service.lake.tables.partition_labels import partition_labels
from streamhouse.storage_service.model.lake import LAKE_CHANGE_TYPE_FIELD, LAKE_SYSTEM_FIELDS
from streamhouse.storage_service.model.schema import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)

__all__ = ["FilePlanner"]


class FilePlanner:
    """One plan over the manifests of one snapshot.

    `field_ids` finds the columns of `schema` in the lake's; that of a table which is not
    Streamhouse's has no system columns.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        lake_schema: IcebergSchema,
        schema: Schema,
        query: LakeQuery,
        field_ids: Mapping[str, int | None],
    ) -> None:
        self.read_bytes = 0
        self._name = name
        self._table = table
        self._lake_schema = lake_schema
        self._query = query
        self._system = SystemFields(
            bucket=field_ids.get(BUCKET_COLUMN) or 0,
            offset=field_ids.get(OFFSET_COLUMN) or 0,
            timestamp=field_ids.get(TIMESTAMP_COLUMN) or 0,
        )
        wanted = () if query.predicate is None else query.predicate.columns
        known = (*schema.to_arrow(), LAKE_CHANGE_TYPE_FIELD, *LAKE_SYSTEM_FIELDS)
        types = {field.name: field.type for field in known}
        self._columns = [
            (name, field_id, types[name])
            for name in wanted
            if (field_id := field_ids[name]) is not None
        ]
        # Partitions are tested by name: of a column that the lake knows under another one, nothing
        # is known.
        by_name = {field.name: field.field_id for field in lake_schema.fields}
        self._names_agree = all(by_name.get(name) == field_ids[name] for name in wanted)
        self._tests: dict[int, PartitionTest | None] = {}

    def files(self, snapshot: Snapshot) -> Iterator[LakeFile]:
        """Yield the snapshot's files that may hold wanted rows, with the deletes of each."""
        manifests = manifests_of(self._table.io, snapshot)
        deletes = self.deletes_of(manifests)
        for manifest in manifests:
            if manifest.content != ManifestContent.DATA:
                continue
            test = self._partition_test(manifest.partition_spec_id)
            if test is not None and not test.may_match_manifest(manifest):
                continue
            files = data_files(self._table.io, manifest)
            indexes = self.select(files)
            self.read_bytes += estimated_bytes(files, indexes, self._query, columns=self._columns)
            yield from self.lake_files(files, indexes, deletes)

    def deletes_of(self, manifests: Iterable[ManifestFile]) -> DeleteIndex:
        """Return the position deletes of a snapshot's manifests."""
        return DeleteIndex(
            entry
            for manifest in manifests
            if manifest.content == ManifestContent.DELETES
            for entry in delete_files(self._table.io, manifest, table=self._name)
        )

    def select(self, files: ManifestFiles) -> list[int]:
        """Return the indexes of the files that may hold wanted rows."""
        test = self._partition_test(files.spec_id)
        chosen: list[int] = select_files(
            files,
            self._query,
            system=self._system,
            columns=self._columns,
            partition_may_match=None if test is None else test.may_match,
        ).tolist()
        return chosen

    def _partition_test(self, spec_id: int) -> PartitionTest | None:
        """Return the test of the partitions of a spec, None when nothing prunes."""
        if self._query.predicate is None:
            return None
        if spec_id not in self._tests:
            self._tests[spec_id] = self._make_partition_test(spec_id, self._query.predicate)
        return self._tests[spec_id]

    def _make_partition_test(self, spec_id: int, predicate: Predicate) -> PartitionTest | None:
        if not self._names_agree:
            return None
        try:
            return PartitionTest(
                self._table.specs()[spec_id], self._lake_schema, to_iceberg_expression(predicate)
            )
        except ValueError:
            # A column that the lake does not have yet cannot be bound; its rows are filtered later.
            return None

    def lake_files(
        self, files: ManifestFiles, chosen: Sequence[int], deletes: DeleteIndex
    ) -> Iterator[LakeFile]:
        """Yield the chosen files in that order, with the deletes of each."""
        spec = self._table.specs()[files.spec_id]
        buckets = files.integer_bounds(self._system.bucket)
        offsets = files.integer_bounds(self._system.offset)
        times = files.integer_bounds(self._system.timestamp)
        labels = partition_labels(spec, self._lake_schema, files.partitions)
        constants = [
            {
                field.source_id: value
                for field, value in zip(spec.fields, partition, strict=True)
                if isinstance(field.transform, IdentityTransform)
            }
            for partition in files.partitions
        ]
        for i in chosen:
            if files.formats[i] != "PARQUET":
                raise UnsupportedError(
                    f"lake table '{self._name}': file '{files.paths[i]}' is {files.formats[i]};"
                    " Streamhouse reads Parquet only"
                )
            code = int(files.partition_codes[i])
            one_bucket = buckets.is_known[i] and buckets.lower[i] == buckets.upper[i]
            path = files.paths[i]
            ours = deletes.applying_to(path, files.sequences[i])
            yield LakeFile(
                path=path,
                file_bytes=files.file_bytes[i],
                row_count=files.row_counts[i],
                bucket=int(buckets.lower[i]) if one_bucket else None,
                offset_start=int(offsets.lower[i]) if offsets.is_known[i] else None,
                offset_end=int(offsets.upper[i]) + 1 if offsets.is_known[i] else None,
                timestamp_min_us=int(times.lower[i]) if times.is_known[i] else None,
                timestamp_max_us=int(times.upper[i]) if times.is_known[i] else None,
                row_group_starts=tuple(files.row_group_starts[i] or ()),
                deletes=tuple(DeleteFile(path=e.path, file_bytes=e.file_bytes) for e in ours),
                constants=constants[code],
                partition=labels[code],
            )
