"""Planning a read of 10,000 lake files: in a new process, and in one that planned before.

Then again with 5,000 files of position deletes among them, each for one of the data files. Last a
table of 100,000 files, which has no bar: `docs/scale.md` says what follows from it.
"""

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
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.model.lake.facts import LakeCatalog
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

FILES = 10_000
MANY_FILES = 100_000
DELETE_FILES = 5_000
BUCKETS = 4
REPEATS = 5
TABLE = "default.planning"
LARGE_TABLE = "default.planning_many"
BAR_S = 1.0
BAR_WITH_DELETES_S = 1.5
# Its files are entries only: maintenance would open them.
PROPERTIES = {"table.datalake.auto-maintenance": "false"}

_PLANNER = """
import sys, time
started = time.perf_counter()
from streamhouse.api.client import StreamhouseClient
from streamhouse.reading.files import planner as lake_planner
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.plan.batch_read import plan_batch_read

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
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        _make_table(client, TABLE, FILES)
        _report_plans(service.endpoint, TABLE, f"{FILES:,} lake files", BAR_S)
        _add_delete_files(client)
        client.append(TABLE, make_rows(10_000))
        tier_once(client, TABLE)
        what = f"{FILES:,} lake files and {DELETE_FILES:,} delete files"
        _report_plans(service.endpoint, TABLE, what, BAR_WITH_DELETES_S)
        _make_table(client, LARGE_TABLE, MANY_FILES)
        _report_plans(service.endpoint, LARGE_TABLE, f"{MANY_FILES:,} lake files", None)


def _make_table(client: StreamhouseClient, table: str, file_count: int) -> None:
    client.create_table(table, SCHEMA, bucket_count=BUCKETS, properties=PROPERTIES)
    for first in range(0, BUCKETS * 10_000, 10_000):
        client.append(table, make_rows(10_000, first_id=first))
    tier_once(client, table)
    _multiply_files(client, table, file_count)
    # A round of our own on top: the service names only snapshots that tiering made.
    client.append(table, make_rows(10_000))
    tier_once(client, table)


def _report_plans(endpoint: str, table: str, what: str, bar_s: float | None) -> None:
    imports, *plans = zip(*(_run(endpoint, table) for _ in range(REPEATS)), strict=True)
    names = (
        f"planning {what}, first time in a process (after {median(imports):.2f} s of imports)",
        f"planning {what} again",
        f"planning {what} with a where that leaves 100 files",
    )
    for name, seconds in zip(names, plans, strict=True):
        took = median(seconds)
        limit_s = BAR_S if bar_s is None else bar_s
        report(
            name,
            measured=f"{took:.3f} s",
            limit=f"the bar of {limit_s:g} s" if bar_s else f"{limit_s:g} s for {FILES:,} files",
            ratio=took / limit_s,
            bar="at most 1" if bar_s else "no bar",
            reached=took <= bar_s if bar_s else None,
        )


def _run(endpoint: str, table: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", _PLANNER, endpoint, table],
        capture_output=True,
        text=True,
        check=True,
    )
    counts = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert counts[1] >= FILES > 200 > counts[3], counts
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def _multiply_files(client: StreamhouseClient, name: str, file_count: int) -> None:
    """Commit entries for files that do not exist, like the tiered ones: planning opens none."""
    table = _open(client, name)
    patterns = [task.file for task in table.scan().plan_files()]
    ids = {field.name: field.field_id for field in table.schema().fields}
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        for number in range(file_count - len(patterns)):
            append.append_data_file(_like(patterns[number % len(patterns)], ids, number))


def _add_delete_files(client: StreamhouseClient) -> None:
    """Delete the first row of every other file, each in a delete file of its own."""
    table = _open(client, TABLE)
    tasks = list(table.scan().plan_files())[: 2 * DELETE_FILES : 2]
    commit_delete_files(
        table,
        [
            position_delete_file(
                table,
                [(task.file.file_path, 0)],
                partition=Record(*task.file.partition._data),
            )
            for task in tasks
        ],
    )


def _open(client: StreamhouseClient, name: str) -> Table:
    from pyiceberg.catalog import load_catalog

    found: LakeCatalog = client.lake_catalog()
    return load_catalog(found.name, **found.properties).load_table(name)


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
