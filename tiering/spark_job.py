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

    Without `master` the session is what spark-submit or the environment configured.
    """
    # Workers run `python3` from PATH unless told otherwise, and a session reads this only once.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from streamhouse.tiering.worker._spark_runner import SparkRunner

    builder = SparkSession.builder.appName("streamhouse-tiering")
    if master is not None:
        builder = builder.master(master).config("spark.ui.enabled", "false")
    # Our own progress says rows, not tasks, and both cannot share a terminal.
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    # Several tables are in flight: the tasks of a small round do not wait for those of a large one.
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
