"""The options by which a command finds a running service, and its way there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from streamhouse.storage_service.client import ENDPOINT_VARIABLE, StorageClient

__all__ = ["endpoint_option", "open_client", "token_file_option"]

_FIRST_CONTACT_S: Final = 5.0

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


def open_client(endpoint: str | None, *, token: str | None = None) -> StorageClient:
    """Return a client for a command: a wrong endpoint is said soon, a takeover is waited for."""
    client = StorageClient(endpoint, token=token)
    client.transport.routes.first_contact_s = _FIRST_CONTACT_S
    return client
