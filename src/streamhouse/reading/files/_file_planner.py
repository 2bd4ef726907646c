"""Which files of a lake snapshot a read needs, from its manifests; on the driver only.

What manifests say is pruned in _file_pruning.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import LAKE_CHANGE_TYPE_FIELD, LAKE_SYSTEM_FIELDS
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)
from streamhouse.lake.opened_table import OpenedTable, SnapshotFiles
from streamhouse.lake.snapshots.live_files import (
    DeleteIndex,
    ManifestFiles,
    unreadable_format,
)
from streamhouse.reading.files._file_pruning import (
    LakeQuery,
    SystemFields,
    estimated_bytes,
    select_files,
)
from streamhouse.reading.scan.scan import LakeFile
from streamhouse.reading.where._iceberg_expression import to_iceberg_expression

__all__ = ["FilePlanner"]


class FilePlanner:
    """One plan over the manifests of one snapshot.

    `field_ids` finds the columns of `schema` in the lake's; that of a table which is not
    Streamhouse's has no system columns.
    """

    def __init__(
        self,
        table: OpenedTable,
        schema: Schema,
        query: LakeQuery,
        field_ids: Mapping[str, int | None],
    ) -> None:
        self.read_bytes = 0
        self._table = table
        self._query = query
        self._system = SystemFields(
            bucket=field_ids.get(BUCKET_COLUMN) or 0,
            offset=field_ids.get(OFFSET_COLUMN) or 0,
            timestamp=field_ids.get(TIMESTAMP_COLUMN) or 0,
        )
        names = () if query.predicate is None else query.predicate.columns
        fields = (*schema.to_arrow(), LAKE_CHANGE_TYPE_FIELD, *LAKE_SYSTEM_FIELDS)
        types = {field.name: field.type for field in fields}
        self._names = table.name_mapping()
        unsure = table.misnamed_ids()
        self._columns = [
            (name, field_id, types[name])
            for name in names
            if (field_id := field_ids[name]) is not None and field_id not in unsure
        ]
        # Partitions are tested by name: of a column that the lake knows under another one, nothing
        # is known.
        by_name = table.field_ids()
        names_agree = all(by_name.get(name) == field_ids[name] for name in names)
        self._partitions = (
            table.partition_filter(to_iceberg_expression(query.predicate))
            if query.predicate is not None and names_agree
            else None
        )

    def files(self, snapshot: SnapshotFiles) -> Iterator[LakeFile]:
        """Yield the snapshot's files with possible rows of the query, and the files' deletes."""
        deletes = snapshot.deletes()
        for files in snapshot.data(self._partitions):
            indexes = self.select(files)
            self.read_bytes += estimated_bytes(files, indexes, self._query, columns=self._columns)
            yield from self.lake_files(files, indexes, deletes)

    def select(self, files: ManifestFiles) -> list[int]:
        """Return the indexes of the files with possible rows of the query."""
        matches = None
        if self._partitions is not None:
            matches = self._partitions.matches(files.spec_id, files.partitions)
        chosen: list[int] = select_files(
            files,
            self._query,
            system=self._system,
            columns=self._columns,
            partition_matches=matches,
        ).tolist()
        return chosen

    def lake_files(
        self, files: ManifestFiles, chosen: Sequence[int], deletes: DeleteIndex
    ) -> Iterator[LakeFile]:
        """Yield the chosen files in that order, with the deletes of each."""
        buckets = files.integer_bounds(self._system.bucket)
        offsets = files.integer_bounds(self._system.offset)
        times = files.integer_bounds(self._system.timestamp)
        labels = self._table.partition_labels(files)
        constants = self._table.partition_constants(files)
        # One file of each format stands for all files of the format.
        for i in {files.formats[i]: i for i in chosen}.values():
            if problem := unreadable_format(files.paths[i], files.formats[i]):
                raise UnsupportedError(f"lake table '{self._table.name}': {problem}")
        for i in chosen:
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
                deletes=tuple(entry.deletes for entry in ours),
                constants=constants[code],
                partition=labels[code],
                name_mapping=self._names,
            )
