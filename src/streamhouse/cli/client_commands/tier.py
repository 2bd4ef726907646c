"""`streamhouse tier`: moves rows from the log into Iceberg, in this process or on Spark."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from streamhouse.cli.log_options import log_options
from streamhouse.core.extras import require
from streamhouse.core.log_lines import configure_logging
from streamhouse.tiering.worker.job import JobOptions, job_options, run_job

__all__ = ["command"]


@click.command("tier")
@job_options
@click.option(
    "--master",
    help="Spark master, as in local[4] or spark://host:7077. Default: threads of this process,"
    " without Spark and Java.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Tasks at once without --master. Default: one per core.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Log each round, and why the worker is idle; --log-level info sums a minute up.",
)
@log_options("warning")
def command(
    *,
    master: str | None,
    threads: int | None,
    log_level: str,
    log_format: str,
    verbose: bool,
    **options: Any,
) -> None:
    """Move rows from the log into their Iceberg tables.

    Several workers may run at once, on several machines: each table is tiered by one worker at a
    time. The exit code is 1 when a table could not be tiered.
    """
    configure_logging("info" if verbose and log_level == "warning" else log_level, log_format)
    if verbose:
        logging.getLogger("streamhouse.tiering").setLevel(logging.DEBUG)
    job = JobOptions.from_command_line(**options)
    if master is None:
        from streamhouse.tiering.worker.thread_runner import ThreadRunner  # noqa: PLC0415 - `--help` does not wait for pyiceberg

        sys.exit(run_job(job, ThreadRunner(threads)))
    sys.exit(_run_on_spark(job, master))


def _run_on_spark(job: JobOptions, master: str) -> int:
    require("spark", "'streamhouse tier --master'")
    from streamhouse.tiering.spark_job import run_on_spark  # noqa: PLC0415 - `--help` does not wait for pyiceberg

    return run_on_spark(job, master=master)
