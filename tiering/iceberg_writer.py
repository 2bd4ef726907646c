"""Written Parquet files as Iceberg data files: statistics come from footers, no file is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.typedef import Record

from streamhouse.tiering.parquet_writer import WrittenFile

__all__ = ["data_files"]


def data_files(
    written: Sequence[WrittenFile],
    *,
    schema: IcebergSchema,
    properties: Mapping[str, str],
    spec_id: int,
    sort_order_id: int,
) -> list[DataFile]:
    """Return the data files to commit, in the order of `written`.

    Args:
        schema: the one the files were written with.
        properties: the lake table's; they say which columns get which statistics.
    """
    plan = compute_statistics_plan(schema, dict(properties))
    ids = parquet_path_to_id_mapping(schema)
    files = []
    for file in written:
        footer = pq.read_metadata(pa.BufferReader(file.footer))
        statistics = data_file_statistics_from_parquet_metadata(footer, plan, ids)
        data_file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=Record(*file.partition),
            file_size_in_bytes=file.size_bytes,
            sort_order_id=sort_order_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )
        data_file.spec_id = spec_id
        files.append(data_file)
    return files
