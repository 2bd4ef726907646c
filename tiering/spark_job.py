"""The tiering job for spark-submit, which makes the session's settings:

spark-submit --master ... <site-packages>/streamhouse/tiering/spark_job.py --endpoint URL --once
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from streamhouse.core.errors import StreamhouseError
from streamhouse.tiering.worker.job import JobOptions, job_options, run_job

__all__ = ["run_on_spark"]


def run_on_spark(job: JobOptions, *, master: str | None = None) -> int:
    """Run the job on a Spark session of its own, stopped at the end; return the exit code.

    Without `master` spark-submit or the environment configures the session.
    """
    # Spark workers run `python3` from PATH by default; a session reads the setting only once.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is an extra

    from streamhouse.tiering.worker._spark_runner import SparkRunner  # noqa: PLC0415 - pyspark is an extra

    builder = SparkSession.builder.appName("streamhouse-tiering")
    if master is not None:
        builder = builder.master(master).config("spark.ui.enabled", "false")
    # Streamhouse's progress counts rows; Spark's progress bar cannot share the terminal.
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    # Several tables are in flight: tasks of a small round must not wait for a large round.
    builder = builder.config("spark.scheduler.mode", "FAIR")
    spark = builder.getOrCreate()
    try:
        return run_job(job, SparkRunner(spark))
    finally:
        spark.stop()


@click.command("spark_job")
@job_options
def _command(**options: Any) -> None:
    """Move rows from the log into their Iceberg tables, on Spark."""
    sys.exit(run_on_spark(JobOptions.from_command_line(**options)))


if __name__ == "__main__":
    try:
        _command(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StreamhouseError as error:
        click.echo(f"streamhouse: {error}", err=True)
        sys.exit(1)
