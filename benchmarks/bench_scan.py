"""`client.scan` of 20 million rows in lake and log: how much memory its process takes, how fast.

A process of its own reads; its peak is what the kernel says of it. Beside it one reads the same
rows with `client.read`, for the ratio of processor time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from benchmarks.harness import SCHEMA, make_rows, report
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

LAKE_ROWS = 18_000_000
LOG_ROWS = 2_000_000
CALL_ROWS = 500_000
TABLE = "default.scanned"
BAR_MIB = 300

_READER = """
import sys, time
from streamhouse.api.client import StreamhouseClient

def peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))

endpoint, table, call = sys.argv[1:]
with StreamhouseClient(endpoint) as client:
    if call == "scan":
        rows = sum(batch.num_rows for batch in client.scan(table))
    elif call == "query":
        found = client.query(f"SELECT count(amount) AS n FROM scanned WHERE id >= 0")
        rows = found.column("n")[0].as_py()
    else:
        rows = client.read(table).num_rows
print(rows, peak_mib(), time.process_time())
"""


def main() -> None:
    """Report the peak of a scan, and its processor time against reading all at once."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table(TABLE, SCHEMA, bucket_count=2)
        _append(client, LAKE_ROWS)
        tier_once(client, TABLE)
        _append(client, LOG_ROWS)
        scan_mib, scan_s = _measured(service.endpoint, "scan")
        query_mib, _ = _measured(service.endpoint, "query")
        read_mib, read_s = _measured(service.endpoint, "read")
    for name, mib in (("scan", scan_mib), ("query", query_mib)):
        report(
            f"client.{name} of {LAKE_ROWS + LOG_ROWS:,} rows: peak resident memory",
            measured=f"{mib:,} MiB",
            limit=f"{read_mib:,} MiB for client.read",
            ratio=mib / read_mib,
            bar=f"{BAR_MIB} MiB",
            reached=mib <= BAR_MIB,
        )
    report(
        "client.scan against client.read: processor time",
        measured=f"{scan_s:.1f} s",
        limit=f"{read_s:.1f} s",
        ratio=scan_s / read_s,
        bar="1.2x",
        reached=scan_s <= 1.2 * read_s,
    )


def _append(client: StreamhouseClient, row_count: int) -> None:
    rows = make_rows(CALL_ROWS)
    for _ in range(row_count // CALL_ROWS):
        client.append(TABLE, rows)


def _measured(endpoint: str, call: str) -> tuple[int, float]:
    """Return the peak of a process that makes a call in MiB, and its processor time."""
    done = subprocess.run(
        [sys.executable, "-c", _READER, endpoint, TABLE, call],
        check=True,
        capture_output=True,
        text=True,
    )
    rows, peak_mib, cpu_s = done.stdout.split()
    assert int(rows) == LAKE_ROWS + LOG_ROWS, f"{call}: {rows} rows"
    return int(peak_mib), float(cpu_s)


if __name__ == "__main__":
    main()
