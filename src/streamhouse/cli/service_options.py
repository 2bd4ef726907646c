"""The options with a running service's address, and the clients of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import click

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import (
    ENDPOINT_VARIABLE,
    ApplicationClient,
    StorageClient,
)
from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.core.secret_sources import read_secret

__all__ = [
    "endpoint_option",
    "open_client",
    "open_owner",
    "open_reader",
    "read_token",
    "token_file_option",
]

_FIRST_CONTACT_S: Final = 5.0

_Client = TypeVar("_Client", bound=ApplicationClient)

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


def read_token(token_file: Path | None) -> str | None:
    """Return the token in the file of `--token-file`; without a file, None: the environment's."""
    return None if token_file is None else read_secret(token_file, kind="token")


def open_client(
    endpoint: str | None, *, token: str | None = None, first_contact_s: float = _FIRST_CONTACT_S
) -> StorageClient:
    """Return a client for a command. A wrong endpoint fails soon; a takeover is awaited.

    A command decides by what it reads, and goes on where an earlier one has ended: it asks the
    owner, whatever the endpoint says.
    """
    client = StorageClient(endpoint, token=token, read_from="owner")
    return _fail_soon(client, first_contact_s)


def open_reader(endpoint: str | None, *, token: str | None = None) -> StreamhouseClient:
    """Return a client as `open_client` does, for a command that also reads the lake."""
    return _fail_soon(StreamhouseClient(endpoint, token=token), _FIRST_CONTACT_S)


def _fail_soon(client: _Client, first_contact_s: float) -> _Client:
    StorageClient.of(client).transport.routes.first_contact_s = first_contact_s
    return client


def open_owner(client: StorageClient, shard: str, *, token: str | None = None) -> StorageClient:
    """Return a client of the process that owns a shard of `client`'s service.

    The service's address may lead to any shard, to another shard with each connection. Raises
    `InvalidRequestError` for a shard that the service does not have, `UnavailableError` for a shard
    without an owner.
    """
    shards = {shard["shard"]: shard for shard in client.shards()}
    if shard not in shards:
        raise InvalidRequestError(
            f"the service at {client.endpoint} has no shard '{shard}'; name the right one with"
            " --endpoint"
        )
    endpoints = client.transport.routes.endpoints
    url = endpoints.resolve(shards[shard]["endpoint"]) if shards[shard]["is_live"] else None
    if url is None:
        raise UnavailableError(
            f"shard '{shard}' of the service at {client.endpoint} has no owner that can be reached;"
            " 'streamhouse shards' shows them"
        )
    return open_client(endpoints.at(url).text, token=token)
