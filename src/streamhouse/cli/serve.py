"""`streamhouse serve`: the storage service as a process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from streamhouse.storage_service.config import (
    DEFAULT_CATALOG_NAME,
    DEFAULT_PORT,
    ServiceConfig,
)
from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.lake import LakeCatalog, LakeState, parse_catalog_properties
from streamhouse.storage_service.model.table import TableInfo, TablePath

if TYPE_CHECKING:
    from streamhouse.storage_service.tablet.key_recovery import LakeBucket, LakeRows

__all__ = ["command"]

_F = TypeVar("_F", bound=Callable[..., Any])

# With glibc's defaults every large body is mapped and unmapped, page by page: uploads are 3 to 5
# times slower. The variables are read when a process starts, hence the exec.
_MALLOC_VARIABLES: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}


def _limit_options(command: _F) -> _F:
    for option in reversed(ServiceConfig.options()):
        text = f"{option.help} [default: {option.default} {option.unit}]"
        command = click.option(option.flag, option.name, metavar="N", help=text)(command)
    return command


@click.command("serve")
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is kept; made if it does not exist.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, type=int, help="0 picks a free port."
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the bearer token that callers must send; needed beyond loopback.",
)
@click.option(
    "--catalog",
    "catalog_name",
    default=DEFAULT_CATALOG_NAME,
    show_default=True,
    help="Name of the Iceberg catalog.",
)
@click.option(
    "--catalog-property",
    "catalog_properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="pyiceberg catalog property; default: SQLite in the data directory.",
)
@click.option(
    "--tiering",
    type=click.Choice(["off", "embedded"]),
    default="off",
    show_default=True,
    help="embedded: a thread of this process moves the log into Iceberg.",
)
@click.option(
    "--rebuild",
    "rebuild",
    multiple=True,
    metavar="DATABASE.TABLE",
    help="Drop the rows by key of a primary key table and make them again from changelog and lake;"
    " may be repeated.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged to stderr.",
)
@_limit_options
def command(
    *,
    data_dir: Path,
    host: str,
    port: int,
    token_file: Path | None,
    catalog_name: str,
    catalog_properties: tuple[str, ...],
    tiering: str,
    rebuild: tuple[str, ...],
    log_level: str,
    **limits: str | None,
) -> None:
    """Run the storage service until SIGTERM or Ctrl-C.

    Prints `streamhouse listening on URL` when it takes requests. Numbers may be sizes (64mb) or
    durations (30s) where the unit is bytes or ms.
    """
    config = ServiceConfig.from_texts(
        {name: text for name, text in limits.items() if text is not None},
        data_dir=data_dir,
        host=host,
        port=port,
        token=None if token_file is None else _read_token(token_file),
        catalog_name=catalog_name,
        catalog_properties=parse_catalog_properties(catalog_properties),
    )
    tables = frozenset(TablePath.parse(text) for text in rebuild)
    _restart_with_tuned_malloc()
    # Not at the top: the process is about to be replaced there.
    from streamhouse.storage_service.server.listener import run_service
    from streamhouse.storage_service.server.log_format import configure_logging
    from streamhouse.storage_service.tablet.key_recovery import KeyRecovery

    configure_logging(log_level)

    def on_ready(endpoint: str) -> Callable[[], None]:
        stop = _start_tiering(endpoint, config.token) if tiering == "embedded" else _nothing
        click.echo(f"streamhouse listening on {endpoint}")
        sys.stdout.flush()
        return stop

    recovery = KeyRecovery(lake_rows=_lake_rows(config.lake_catalog()), rebuild=tables)
    run_service(config, on_ready=on_ready, recovery=recovery)


def _lake_rows(catalog: LakeCatalog) -> LakeRows:
    """Return what reads lost rows from the lake: the service itself knows no lake library."""
    from streamhouse.storage_service.tablet.key_recovery import LakeBucket

    def lake_rows(table: TableInfo, lake: LakeState, bucket: int) -> LakeBucket:
        from streamhouse.connector.lake_bucket import lake_bucket_rows

        return LakeBucket(*lake_bucket_rows(catalog, table, lake, bucket))

    return lake_rows


def _start_tiering(endpoint: str, token: str | None) -> Callable[[], None]:
    from streamhouse.tiering.embedded import EmbeddedTieringWorker

    worker = EmbeddedTieringWorker(endpoint=endpoint, token=token)
    worker.start()
    return worker.stop


def _nothing() -> None:
    """There is nothing to stop."""


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"token file {path} cannot be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise InvalidRequestError(f"token file {path} must hold one token without spaces")
    return token


def _restart_with_tuned_malloc() -> None:
    """Replace this process by itself with malloc tuned; the process id stays."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    os.environ.update(_MALLOC_VARIABLES)
    os.execv(sys.executable, sys.orig_argv)
