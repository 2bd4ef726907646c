"""What the quickstart's steps stand on: a service, a Spark session, headings, commands."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

# Spark's Python workers run what this variable names, not the Python that started them.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Without it Spark warns about the address it found for this machine's name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

from pyspark.sql import SparkSession

LOG4J = Path(__file__).resolve().parents[1] / "spark_conf" / "log4j2.properties"
console = Console(highlight=False, width=100)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print a heading, and after the work how long it took."""
    console.print(f"\n[bold cyan]{title}[/]")
    started = time.perf_counter()
    yield
    console.print(f"[dim]took {time.perf_counter() - started:.1f} s[/]")


@contextlib.contextmanager
def storage_service(data_dir: Path) -> Iterator[None]:
    """Run `streamhouse serve` on a free port, and name it to everything started after it."""
    arguments = ["serve", "--data-dir", str(data_dir), "--port", "0", "--log-level", "warning"]
    command = [str(streamhouse_command()), *arguments]
    console.print("[dim]$ streamhouse serve --data-dir DIR --port 0[/]")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            ready = service.stdout.readline().strip()
            if not ready.startswith("streamhouse listening on "):
                raise SystemExit("the storage service did not start; its message is above")
            console.print(ready)
            os.environ["STREAMHOUSE_ENDPOINT"] = ready.removeprefix("streamhouse listening on ")
            yield
        finally:
            service.terminate()


@contextlib.contextmanager
def spark_session(home: Path) -> Iterator[SparkSession]:
    """Start Spark on both cores, quietly."""
    console.print("[dim]starting Spark ...[/]")
    spark = (
        SparkSession.builder.appName("streamhouse quickstart")
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        # Stopping a stream inside foreachBatch prints a stack overflow with the default stack.
        .config("spark.driver.extraJavaOptions", f"-Xss16m -Dlog4j2.configurationFile={LOG4J}")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def run_command(*arguments: str) -> None:
    """Run a `streamhouse` command as a user would."""
    console.print(f"[dim]$ streamhouse {' '.join(arguments)}[/]")
    subprocess.run([str(streamhouse_command()), *arguments], check=True)


def streamhouse_command() -> Path:
    """Return the installed command that belongs to this Python."""
    return Path(sys.executable).with_name("streamhouse")
