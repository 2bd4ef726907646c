"""Other engines reading our Iceberg tables straight from their metadata files.

No catalog of ours is involved: what these return is what anyone finds in the lake. A query calls
the table `lake_table`. Values are plain JSON, the same from each engine (see `json_rows`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from integration.judges.environment import judge_python

__all__ = [
    "read_many_with_spark35",
    "read_with_duckdb",
    "read_with_spark35",
    "run_in_spark35",
]

ROOT: Final = Path(__file__).resolve().parents[2]


def read_with_duckdb(metadata_location: str, query: str) -> list[dict[str, Any]]:
    """The rows of `query` from DuckDB 1.5.5 and its Iceberg extension."""
    return _ask(Path(sys.executable), "duckdb_read", [(metadata_location, query)])[0]


def read_with_spark35(metadata_location: str, query: str) -> list[dict[str, Any]]:
    """The rows of `query` from Spark 3.5.9 with Iceberg Java 1.10.2. Takes some 15 seconds."""
    return read_many_with_spark35([(metadata_location, query)])[0]


def read_many_with_spark35(
    requests: list[tuple[str, str]], *, buckets: Mapping[str, Path] | None = None
) -> list[list[dict[str, Any]]]:
    """The rows of each (metadata location, query) in one Spark session.

    `buckets` says to which folders the objects of S3 buckets have been copied.
    """
    copies = [f"{bucket}={folder}" for bucket, folder in (buckets or {}).items()]
    return _ask(judge_python("spark35"), "spark35_read", requests, *copies)


def run_in_spark35(statements: Sequence[str], **catalog: str) -> list[Any]:
    """The answers of Spark 3.5 with Iceberg Java to statements in a `catalog`.

    `spark35_catalog.py` says how a catalog is named, and what the answers are.
    """
    done = subprocess.run(
        [str(judge_python("spark35")), "-m", "integration.judges.spark35_catalog"],
        input=json.dumps({**catalog, "statements": statements}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
    assert len(answers) == len(statements), done.stdout + done.stderr[-4000:]
    return answers


def _ask(
    python: Path, program: str, requests: list[tuple[str, str]], *arguments: str
) -> list[list[dict[str, Any]]]:
    """Run an engine on all requests; the time limit of the test that asks is its own, too."""
    done = subprocess.run(
        [str(python), "-m", f"integration.judges.{program}", *arguments],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"{program} could not read the table:\n{done.stderr[-4000:]}")
    answers: list[list[dict[str, Any]]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")
    ]
    assert len(answers) == len(requests), done.stdout
    return answers
