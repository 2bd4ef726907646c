"""What a new executor process loads before it reads: Spark starts one every idle minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

_PROGRAM = """
import json, os, sys
from streamhouse.reading.scan.scan import LakePiece, ScanColumn, ScanContext, Split
from streamhouse.reading.plan.scan_schema import SYSTEM_COLUMNS, change_type_column
from streamhouse.reading.scan.split_reader import read_split
from streamhouse.core.model.offsets import OffsetRange
import pyarrow as pa

bucket, offset, timestamp = SYSTEM_COLUMNS
context = ScanContext(
    table="db.t", schema_id=0, table_id=1, endpoint="", token=None, output=(offset,),
    bucket_column=bucket, offset_column=offset, timestamp_column=timestamp,
    change_type_column=change_type_column(has_changelog=False),
)
piece = LakePiece(
    path=sys.argv[1], file_bytes=os.path.getsize(sys.argv[1]), start_byte=0, end_byte=1 << 40,
    row_count=1,
    ranges=(OffsetRange(bucket=0, start=2, end=5),),
)
rows = sum(batch.num_rows for batch in read_split(Split((piece,)), context))
heavy = {"pandas", "pyiceberg", "sqlglot", "pyspark", "pyarrow.dataset", "fastapi", "rocksdict"}
print(json.dumps([rows, sorted(heavy & set(sys.modules))]))
"""


@pytest.mark.slow
def test_reading_the_lake_needs_neither_pandas_nor_the_lake_library(tmp_path: Path) -> None:
    fields = [("__bucket", pa.int32(), 1_000_000), ("__offset", pa.int64(), 1_000_001)]
    schema = pa.schema(
        [pa.field(n, t, metadata={"PARQUET:field_id": str(i)}) for n, t, i in fields]
    )
    pq.write_table(pa.table([[0] * 10, list(range(10))], schema=schema), tmp_path / "f")

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "f")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, []]


@pytest.mark.slow
def test_the_format_needs_neither_pandas_nor_the_lake_library() -> None:
    """Spark loads it in a process of its own, for each load and each write of the driver."""
    program = (
        "import json, sys, streamhouse.connector.format.data_source as loaded;"
        " print(json.dumps(sorted(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert not {"pandas", "pyiceberg"} & set(json.loads(done.stdout))


@pytest.mark.slow
def test_the_package_alone_loads_nothing() -> None:
    program = "import json, sys, streamhouse.connector; print(json.dumps(sorted(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"pyspark", "pyiceberg", "pyarrow", "numpy", "pandas", "httptools"}
