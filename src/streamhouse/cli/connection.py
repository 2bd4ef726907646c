"""The options by which a command finds a running service."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.storage_service.client import ENDPOINT_VARIABLE

__all__ = ["endpoint_option", "token_file_option"]

endpoint_option = click.option(
    "--endpoint",
    envvar=ENDPOINT_VARIABLE,
    help="URL of the storage service; several with commas between them.",
)
token_file_option = click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the bearer token; default: the variable STREAMHOUSE_TOKEN.",
)
