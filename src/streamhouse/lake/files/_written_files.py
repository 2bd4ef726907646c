"""Written Parquet files as Iceberg data and delete files: no file is read for it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.typedef import Record

from streamhouse.lake.files._statistics import StatisticsPlan
from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector
from streamhouse.lake.files.parquet_writer import WrittenFile
from streamhouse.lake.files.position_deletes import (
    PATH_FIELD_ID,
    POSITION_FIELD_ID,
    DeletedRows,
    WrittenDeletes,
)

__all__ = ["data_files", "position_delete_files", "vector_files"]


def data_files(
    written: Sequence[WrittenFile],
    *,
    schema: IcebergSchema,
    properties: Mapping[str, str],
    spec_id: int,
    sort_order_id: int,
) -> list[DataFile]:
    """Return the data files to commit, in the order of `written`; statistics are the footers'.

    Args:
        schema: the one the files were written with.
        properties: the lake table's; they say which columns get which statistics.
    """
    plan = StatisticsPlan(schema, properties)
    files = []
    for file in written:
        footer = pq.read_metadata(pa.BufferReader(file.footer))
        data_file = DataFile.from_args(
            _table_format_version=3,
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=Record(*file.partition),
            file_size_in_bytes=file.size_bytes,
            sort_order_id=sort_order_id,
            equality_ids=None,
            key_metadata=None,
            **plan.of_file(footer),
        )
        data_file.spec_id = spec_id
        files.append(data_file)
    return files


def position_delete_files(written: Sequence[WrittenDeletes]) -> list[DataFile]:
    """Return the position delete files to commit, in the order of `written`."""
    files = []
    for deletes in written:
        # Engines find the deletes of a data file by the bounds of its path: whole, never cut.
        lower = {
            PATH_FIELD_ID: deletes.data_paths[0].encode(),
            POSITION_FIELD_ID: struct.pack("<q", deletes.first_position),
        }
        upper = {
            PATH_FIELD_ID: deletes.data_paths[-1].encode(),
            POSITION_FIELD_ID: struct.pack("<q", deletes.last_position),
        }
        file = DataFile.from_args(
            _table_format_version=3,
            content=DataFileContent.POSITION_DELETES,
            file_path=deletes.path,
            file_format=FileFormat.PARQUET,
            partition=Record(*deletes.partition),
            record_count=deletes.row_count,
            file_size_in_bytes=deletes.size_bytes,
            column_sizes=None,
            value_counts=None,
            null_value_counts=None,
            nan_value_counts=None,
            lower_bounds=lower,
            upper_bounds=upper,
            key_metadata=None,
            split_offsets=None,
            equality_ids=None,
            sort_order_id=None,
        )
        file.spec_id = deletes.spec_id
        files.append(file)
    return files


def vector_files(
    written: Sequence[DeletionVector], places: Mapping[str, DeletedRows]
) -> list[DataFile]:
    """Return the entries of deletion vectors; `places` has the partition of each data file."""
    files = []
    for vector in written:
        place = places[vector.data_path]
        file = DataFile.from_args(
            _table_format_version=3,
            content=DataFileContent.POSITION_DELETES,
            file_path=vector.path,
            file_format=FileFormat.PUFFIN,
            partition=Record(*place.partition),
            record_count=vector.position_count,
            file_size_in_bytes=vector.file_bytes,
            referenced_data_file=vector.data_path,
            content_offset=vector.offset,
            content_size_in_bytes=vector.size_bytes,
        )
        file.spec_id = place.spec_id
        files.append(file)
    return files
