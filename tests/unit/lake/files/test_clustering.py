"""The order of rows in files of a batch layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.partitioning import Clustering
from streamhouse.lake.files.clustering import ClusteredWriter, clustered
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import (
    FileFormat,
    PartitionedParquetWriter,
)

SCHEMA = pa.schema([pa.field("n", pa.int32()), pa.field("__offset", pa.int64())])


def test_rows_are_sorted_nulls_last_and_ties_keep_their_order() -> None:
    rows = pa.table({"a": ["y", None, "x", "y"], "b": [2, 9, 1, 1], "o": [0, 1, 2, 3]})

    by_a = clustered(rows, Clustering(columns=("a",)))
    by_both = clustered(rows, Clustering(columns=("a", "b")))

    assert by_a["o"].to_pylist() == [2, 0, 3, 1]
    assert by_both["o"].to_pylist() == [2, 3, 0, 1]
    assert clustered(rows, Clustering()) is rows


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_z_order_is_narrow_in_every_column(count: int) -> None:
    random = np.random.default_rng(7)
    size = 4_096
    columns = {f"c{i}": random.permutation(size) for i in range(count)}
    rows = pa.table(columns)

    found = clustered(rows, Clustering(columns=tuple(columns), is_z_order=True))

    # The first 64th of the curve is a cube's corner: narrow in all columns, not in one alone.
    part = found.slice(0, size // 64)
    for name in columns:
        assert max(part[name].to_pylist()) < size * 0.6
    assert sorted(found["c0"].to_pylist()) == list(range(size))


def test_a_z_order_takes_any_type_and_nulls() -> None:
    rows = pa.table(
        {
            "s": pa.chunked_array([["b", None], ["a", "b"]]),
            "f": [1.0, float("nan"), None, -1.0],
            "t": [True, False, None, True],
        }
    )

    found = clustered(rows, Clustering(columns=("s", "f", "t"), is_z_order=True))

    assert found.num_rows == 4
    assert set(found["s"].to_pylist()) == {"a", "b", None}


def test_each_run_goes_into_files_of_its_own(tmp_path: Path) -> None:
    writer = PartitionedParquetWriter(
        LakeFilesystem({}),
        folder=tmp_path.as_uri(),
        name="f",
        bucket=0,
        schema=SCHEMA,
        partitioning=(),
        file_format=FileFormat(),
    )
    target = ClusteredWriter(writer=writer, clustering=Clustering(columns=("n",)), run_bytes_max=24)
    for start in range(0, 8, 2):
        numbers = pa.array([9 - start, 8 - start], pa.int32())
        target.write(pa.table([numbers, pa.array([start, start + 1])], schema=SCHEMA))
    target.flush()
    files = sorted(writer.close(), key=lambda file: file.start_offset)

    assert [(file.start_offset, file.end_offset) for file in files] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
    ]
    assert sum(file.row_count for file in files) == 8
