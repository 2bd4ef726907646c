"""The load test, long. A program:

    python -m tests.load.load [--appends 1000000]

A million one-row appends over 200 connections beside a thousand idle long polls, a slow reader and
bodies of 64 MB; then 200 tables of 8 buckets, without and with a primary key. Prints what it cost;
fails if anybody is not served right or memory passes its bound. `test_load.py` is its short form.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.load.crowd import Crowd, run_crowd
from tests.load.many_tables import run_many_tables

__all__ = ["CROWD_BYTES_MAX", "TABLE_BYTES_MAX"]

CROWD_BYTES_MAX: Final = 1 << 30
"""Most anonymous memory of a service in a crowd, however large it is."""

TABLE_BYTES_MAX: Final = {False: 40_000, True: 700_000}
"""Most bytes a bucket adds, of a log table and of a primary key table."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Load one service; see this module's text.")
    parser.add_argument("--appends", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        crowd = Crowd(appends=given.appends, connections=200, polls=1_000, bodies=8)
        outcome = run_crowd(Path(directory) / "crowd", crowd)
        sys.stdout.write(f"{crowd}: {outcome}\n")
        assert outcome.resident_bytes_max < CROWD_BYTES_MAX
        for is_keyed, bytes_max in TABLE_BYTES_MAX.items():
            seen = run_many_tables(
                Path(directory) / f"tables-{is_keyed}",
                tables=200,
                buckets=8,
                rows=1_000,
                is_keyed=is_keyed,
            )
            sys.stdout.write(f"200 tables of 8 buckets, keys {is_keyed}: {seen}\n")
            for resident in (seen.bytes_written, seen.bytes_restarted):
                assert resident - seen.bytes_empty < 1_600 * bytes_max


if __name__ == "__main__":
    main()
