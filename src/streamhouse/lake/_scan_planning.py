"""Scan planning by the service: the files of a table that a condition needs, as JSON.

The requests and answers are those of the Iceberg REST protocol (`planTableScan`, `fetchScanTasks`).
No plan is kept: a plan of many files ends with a plan task, which says where the next page begins,
in which metadata of the table, and for which request. So any process goes on with a plan.

Invariant: the pages of a plan have every file with a row for the condition, and are of one
snapshot and one schema.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

from pyiceberg.conversions import to_json
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, NestedField, PrimitiveType

from streamhouse.core.errors import NotFoundError, UnsupportedError
from streamhouse.lake._scan_files import FIRST, ScanPage, ScanPlace, page_at
from streamhouse.lake._scan_request import ScanRequest
from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector
from streamhouse.lake.files.deletes.deleted_positions import Deletes
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots.live_files import deletes_of

__all__ = ["next_tasks", "planned_scan"]

_CONTENTS: Final = {
    DataFileContent.DATA: "data",
    DataFileContent.POSITION_DELETES: "position-deletes",
    DataFileContent.EQUALITY_DELETES: "equality-deletes",
}
# Of a committed table, or of a live cut (`live_folders.py`).
_METADATA: Final = re.compile(
    r"metadata/(live/[0-9]{1,12}-[0-9a-f]{32}/)?[^/\\%?#]+\.metadata\.json(\.gz)?"
)


def planned_scan(table: Table, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the completed plan of a scan, in the protocol's form.

    Raises:
        InvalidRequestError: the request is malformed, or names an unknown column.
        SnapshotNotFoundError: the table has no such snapshot.
        UnsupportedError: very many delete files, or many files of a table with metadata elsewhere.
    """
    path = table.metadata_location.removeprefix(_folder(table))
    return {"status": "completed", **_tasks(table, table.metadata, path, request, FIRST)}


def next_tasks(table: Table, plan_task: str) -> dict[str, Any]:
    """Return the page of a plan of `table` that a plan task names.

    Raises as `planned_scan`, and `NotFoundError` for a plan task of another table, or one whose
    metadata is gone.
    """
    gone = NotFoundError(
        f"the plan task is not one of lake table '{'.'.join(table.name())}', or the metadata of its"
        " plan is gone: plan the scan again"
    )
    try:
        path, place, request = json.loads(base64.b64decode(plan_task, b"-_", validate=True))
        scan_place = ScanPlace(*place)
        is_valid = all(type(number) is int and number >= 0 for number in scan_place)
        is_valid = is_valid and bool(_METADATA.fullmatch(path)) and isinstance(request, dict)
    except (ValueError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise gone
    with lake_errors("read the metadata of a plan"):
        try:
            metadata = FromInputFile.table_metadata(table.io.new_input(_folder(table) + path))
        except (FileNotFoundError, ValueError):
            raise gone from None
    if metadata.table_uuid != table.metadata.table_uuid:
        raise gone
    return _tasks(table, metadata, path, request, scan_place)


def _folder(table: Table) -> str:
    return f"{table.location().rstrip('/')}/"


def _tasks(
    table: Table,
    metadata: TableMetadata,
    metadata_path: str,
    body: Mapping[str, Any],
    place: ScanPlace,
) -> dict[str, Any]:
    name = ".".join(table.name())
    request = ScanRequest.of(name, metadata, body)
    with lake_errors(f"plan a scan of lake table '{name}'"):
        page = page_at(name, metadata, table.io, request, place)
        answer = _answer(metadata, page, request)
    if page.next_place is not None:
        if _METADATA.fullmatch(metadata_path) is None:
            raise UnsupportedError(
                f"the scan of lake table '{name}' needs many files, and the table's metadata is not"
                " in its folder 'metadata': plan locally, or ask for fewer rows"
            )
        plan_task = json.dumps([metadata_path, page.next_place, body]).encode()
        answer["plan-tasks"] = [base64.urlsafe_b64encode(plan_task).decode()]
    return answer


def _answer(metadata: TableMetadata, page: ScanPage, request: ScanRequest) -> dict[str, Any]:
    types = {field.field_id: field.field_type for s in metadata.schemas for field in _fields(s)}
    numbers: dict[Deletes, int] = {}
    delete_files: list[dict[str, Any]] = []
    tasks = []
    for planned in page.files:
        references = []
        for file in planned.deletes:
            key = deletes_of(file)
            if key not in numbers:
                numbers[key] = len(delete_files)
                delete_files.append(_delete_file(file, metadata, types))
            references.append(numbers[key])
        task: dict[str, Any] = {
            "data-file": _content_file(planned.file, metadata, types, request.stats)
        }
        if references:
            task["delete-file-references"] = references
        if request.residual is not None:
            task["residual-filter"] = request.residual
        tasks.append(task)
    return {"file-scan-tasks": tasks, "delete-files": delete_files}


def _delete_file(
    file: DataFile, metadata: TableMetadata, types: Mapping[int, IcebergType]
) -> dict[str, Any]:
    value = _content_file(file, metadata, types, frozenset())
    vector = deletes_of(file)
    if isinstance(vector, DeletionVector):
        value["referenced-data-file"] = vector.data_path
        value["content-offset"] = vector.offset
        value["content-size-in-bytes"] = vector.size_bytes
    if file.equality_ids:
        value["equality-ids"] = list(file.equality_ids)
    return value


def _fields(schema: Schema) -> Iterable[NestedField]:
    return (schema.find_field(field_id) for field_id in schema.field_ids)


def _content_file(
    file: DataFile, metadata: TableMetadata, types: Mapping[int, IcebergType], stats: Set[int]
) -> dict[str, Any]:
    spec = metadata.specs()[file.spec_id]
    partition = [
        _json_value(field.transform.result_type(types[field.source_id]), file.partition[position])
        for position, field in enumerate(spec.fields)
    ]
    value: dict[str, Any] = {
        "content": _CONTENTS[file.content],
        "spec-id": file.spec_id,
        "partition": partition,
        "file-path": file.file_path,
        "file-format": file.file_format.value.lower(),
        "file-size-in-bytes": file.file_size_in_bytes,
        "record-count": file.record_count,
    }
    if file.split_offsets:
        value["split-offsets"] = list(file.split_offsets)
    if file.sort_order_id is not None:
        value["sort-order-id"] = file.sort_order_id
    for key, counts in (
        ("column-sizes", file.column_sizes),
        ("value-counts", file.value_counts),
        ("null-value-counts", file.null_value_counts),
        ("nan-value-counts", file.nan_value_counts),
    ):
        value |= _map(key, {i: n for i, n in (counts or {}).items() if i in stats})
    for key, bounds in (("lower-bounds", file.lower_bounds), ("upper-bounds", file.upper_bounds)):
        # In the binary form of manifests: Iceberg Java reads no other, whatever a column's type.
        value |= _map(key, {i: b.hex().upper() for i, b in (bounds or {}).items() if i in stats})
    return value


def _map(key: str, values: Mapping[int, Any]) -> dict[str, Any]:
    return {key: {"keys": list(values), "values": list(values.values())}} if values else {}


def _json_value(kind: IcebergType, value: Any) -> Any:
    if value is None or not isinstance(kind, PrimitiveType):
        return None
    if not _is_in_json(value):
        raise UnsupportedError(
            "a partition of an infinite number or NaN is not in JSON: plan locally"
        )
    return to_json(kind, value)


def _is_in_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
