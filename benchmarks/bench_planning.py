"""Planning a read of 10,000 lake files: in a new process, and in one that planned before."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record

from benchmarks.harness import SCHEMA, make_rows, median, report
from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.model.lake import LakeCatalog
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

FILES = 10_000
BUCKETS = 4
REPEATS = 5
TABLE = "default.planning"
BAR_S = 1.0

_PLANNER = """
import sys, time
started = time.perf_counter()
from streamhouse.client import StreamhouseClient
from streamhouse.connector import lake_planner
from streamhouse.connector.options import BATCH, read_options
from streamhouse.connector.scan_schema import output_columns
from streamhouse.connector.union_read import plan_batch_read

endpoint, table = sys.argv[1:3]
options = read_options(
    {"table": table, "endpoint": endpoint, "where": "id >= 5000000 and id < 5100000"}, use=BATCH
)
everything = read_options({"table": table, "endpoint": endpoint}, use=BATCH)

def plan(read):
    state = client.table_state(table)
    output = output_columns(
        state.table.schema, columns=None, include_metadata=False, table=table
    )
    return plan_batch_read(client, state, read, output)

print(0, time.perf_counter() - started)
with StreamhouseClient(endpoint) as client:
    for read in (everything, everything, options):
        started = time.perf_counter()
        files = sum(len(split.pieces) for split in plan(read).splits)
        print(files, time.perf_counter() - started)
"""


def main() -> None:
    """Report the time from nothing to splits."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table(TABLE, SCHEMA, bucket_count=BUCKETS)
            for first in range(0, BUCKETS * 10_000, 10_000):
                client.append(TABLE, make_rows(10_000, first_id=first))
            tier_once(client, TABLE)
            _multiply_files(client)
            # A round of our own on top: the service names only snapshots that tiering made.
            client.append(TABLE, make_rows(10_000))
            tier_once(client, TABLE)
        runs = [_run(service.endpoint) for _ in range(REPEATS)]
    imports, *plans = zip(*runs, strict=True)
    names = (
        f"planning {FILES:,} lake files, first time in a process"
        f" (after {median(imports):.2f} s of imports)",
        f"planning {FILES:,} lake files again",
        f"planning {FILES:,} lake files with a where that leaves 100",
    )
    for name, seconds in zip(names, plans, strict=True):
        took = median(seconds)
        report(
            name,
            measured=f"{took:.3f} s",
            limit=f"the bar of {BAR_S:.0f} s",
            ratio=took / BAR_S,
            bar="at most 1",
            reached=took <= BAR_S,
        )


def _run(endpoint: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", _PLANNER, endpoint, TABLE],
        capture_output=True,
        text=True,
        check=True,
    )
    counts = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert counts[1] >= FILES > 200 > counts[3], counts
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def _multiply_files(client: StreamhouseClient) -> None:
    """Commit entries for files that do not exist, like the tiered ones: planning opens none."""
    from pyiceberg.catalog import load_catalog

    found: LakeCatalog = client.lake_catalog()
    table: Table = load_catalog(found.name, **found.properties).load_table(TABLE)
    patterns = [task.file for task in table.scan().plan_files()]
    ids = {field.name: field.field_id for field in table.schema().fields}
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        for number in range(FILES - len(patterns)):
            append.append_data_file(_like(patterns[number % len(patterns)], ids, number))


def _like(pattern: DataFile, ids: dict[str, int], number: int) -> DataFile:
    """Return an entry with ids of its own, inside the offsets that the service knows as tiered."""
    lower, upper = dict(pattern.lower_bounds), dict(pattern.upper_bounds)
    lower[ids["id"]] = (number * 1_000).to_bytes(8, "little")
    upper[ids["id"]] = (number * 1_000 + 999).to_bytes(8, "little")
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=str(Path(pattern.file_path).parent / f"{uuid.uuid4()}.parquet"),
        file_format=FileFormat.PARQUET,
        partition=Record(*pattern.partition._data),
        record_count=pattern.record_count,
        file_size_in_bytes=pattern.file_size_in_bytes,
        column_sizes=dict(pattern.column_sizes),
        value_counts=dict(pattern.value_counts),
        null_value_counts=dict(pattern.null_value_counts),
        nan_value_counts={},
        lower_bounds=lower,
        upper_bounds=upper,
        key_metadata=None,
        split_offsets=list(pattern.split_offsets or ()),
        equality_ids=None,
        sort_order_id=pattern.sort_order_id,
    )
    file.spec_id = pattern.spec_id
    return file


if __name__ == "__main__":
    main()
