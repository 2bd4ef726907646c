"""`streamhouse demo`: a service with a lively example, in one command and one terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from streamhouse.cli.log_options import log_options
from streamhouse.cli.server_commands.demo_shop import CUSTOMERS, FRESHNESS, ORDERS, DemoShop
from streamhouse.cli.server_commands.embedded_tiering import start_tiering
from streamhouse.client import DEFAULT_ENDPOINT, StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.log_lines import configure_logging
from streamhouse.storage_service.config import ServiceConfig

__all__ = ["command"]

_HOST: Final = "127.0.0.1"
_PORT: Final = int(DEFAULT_ENDPOINT.rpartition(":")[2])


@click.command("demo")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data here. Default: a temporary directory, removed at the end.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help=f"Default: {_PORT}, or a free port where {_PORT} is taken.",
)
@click.option(
    "--rate",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Orders a second.",
)
@log_options("error")
def command(
    *, data_dir: Path | None, port: int | None, rate: int, log_level: str, log_format: str
) -> None:
    """Run a service with tiering and an example: a shop's customers, and orders that never stop.

    Ctrl-C ends everything. Nothing is downloaded.
    """
    configure_logging(log_level, log_format)
    with _directory(data_dir) as directory:
        config = ServiceConfig(data_dir=directory, port=_free_port() if port is None else port)
        _run(config, rate=rate, is_kept=data_dir is not None)
        if sys.stdout.isatty():
            # Below the terminal's ^C.
            click.echo()
    where = f"{directory} has the data" if data_dir is not None else f"{directory} is removed"
    click.echo(f"the demo has ended; {where}")


@contextlib.contextmanager
def _directory(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        yield data_dir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="streamhouse-demo-") as name:
        yield Path(name)


def _free_port() -> int:
    """Return the port of clients' default endpoint, or 0 if another process listens there."""
    try:
        with socket.create_server((_HOST, _PORT)):
            return _PORT
    except OSError:
        return 0


def _run(config: ServiceConfig, *, rate: int, is_kept: bool) -> None:
    from streamhouse.storage_service.door_table import doors_of  # noqa: PLC0415 - a wrong option fails before the service loads
    from streamhouse.storage_service.server.listener import run_service  # noqa: PLC0415 - a wrong option fails before the service loads

    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # A closed terminal ends the demo in order, too: the temporary directory is removed.
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    failures: list[StreamhouseError] = []

    def on_failure(error: StreamhouseError) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(endpoint: str) -> Callable[[], None]:
        client = StorageClient(endpoint)
        lines = _lines(endpoint, config.data_dir, rate=rate, is_kept=is_kept)
        shop = DemoShop(client, rate=rate, on_open=lambda: click.echo(lines), on_failure=on_failure)
        shop.start()
        stop_tiering = start_tiering(endpoint, config)

        def stop() -> None:
            shop.stop()
            client.close()
            stop_tiering()

        return stop

    run_service(config, doors=doors_of(config), on_ready=on_ready)
    if failures:
        raise failures[0]


def _lines(endpoint: str, data_dir: Path, *, rate: int, is_kept: bool) -> str:
    """Return what is there, and what to try."""
    is_default = endpoint == DEFAULT_ENDPOINT
    option = "" if is_default else f" --endpoint {endpoint}"
    argument = "" if is_default else f"'{endpoint}'"
    reader_option = "" if is_default else f".option('endpoint', '{endpoint}')"
    return f"""\
the demo is running; Ctrl-C ends it{"" if is_kept else ", and removes the data"}

  page: {endpoint}/
  data: {data_dir}
  tables: {ORDERS}, {rate} orders a second; {CUSTOMERS}, rows by key
  tiering: within {FRESHNESS} a round moves new rows into Iceberg

in another terminal (the last line needs the extra [spark], and Java):

  {_program("streamhouse")} follow {ORDERS}{option}

  {_program("python")} -c "from streamhouse import StreamhouseClient; \
print(StreamhouseClient({argument}).lookup_one('{CUSTOMERS}', customer_id=7))"

  {_program("python")} -c "import streamhouse; from pyspark.sql import SparkSession; \
spark = SparkSession.builder.getOrCreate(); streamhouse.register(spark); \
spark.read.format('streamhouse'){reader_option}.load('{ORDERS}').groupBy('item').count().show()"
"""


def _program(name: str) -> str:
    """Return how a shell finds a program of this installation: by name, or by its whole path."""
    folder = Path(sys.executable).parent
    on_path = shutil.which(name)
    return name if on_path and Path(on_path).parent == folder else str(folder / name)
