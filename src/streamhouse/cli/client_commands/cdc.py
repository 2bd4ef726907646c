"""`streamhouse cdc`: follows the tables of a PostgreSQL database.

`streamhouse cdc URL` follows. `streamhouse cdc drop URL` removes the slot and the publication from
the source.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from streamhouse.cli.command_group import CommandGroup
from streamhouse.cli.log_options import log_options
from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.log_lines import configure_logging
from streamhouse.core.secret_sources import read_secret

if TYPE_CHECKING:
    from streamhouse.cdc_source.source_address import SourceAddress

__all__ = ["command"]

_logger = logging.getLogger(__name__)

# The names of replication slots, without the prefix that the follower adds.
_STREAM_NAME: Final = re.compile(r"[a-z0-9_]{1,48}")


class _FollowByDefault(CommandGroup):
    """A group with a default: without a subcommand's name it follows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["follow", *args]
        return super().parse_args(ctx, args)


_source = click.argument("url", metavar="URL")
_database_option = click.option(
    "--database",
    help="The Streamhouse database of the tables. Default: the source database's name.",
)
_name_option = click.option(
    "--name",
    help="Names slot and publication streamhouse_NAME in the source. Default: that database.",
)
_password_file_option = click.option(
    "--password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the database's password; default: in the URL, or the variable PGPASSWORD.",
)


@click.group("cdc", cls=_FollowByDefault)
def command() -> None:
    """Follow the tables of a database: 'streamhouse cdc postgres://user@host/shop --tables ...'.

    The tables are read as they are; then each committed change arrives exactly once. The command
    runs until stopped, and resumes at the same place. Meanwhile the database keeps its log for the
    command: 'streamhouse cdc drop URL' ends that.
    """


@command.command("follow", hidden=True)
@_source
@click.option(
    "--tables",
    required=True,
    multiple=True,
    metavar="SCHEMA.TABLE",
    help="The tables to follow, as in 'public.*'; may be repeated, or several with commas.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="SCHEMA.TABLE",
    help="The tables not to follow, as --tables has them.",
)
@_database_option
@_name_option
@_password_file_option
@click.option(
    "--keyless",
    type=click.Choice(["refuse", "append"]),
    default="refuse",
    show_default=True,
    help="Tables without a primary key: their changes may be appended to log tables.",
)
@click.option("--bucket-num", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--snapshot", is_flag=True, help="Read all tables anew, then go on.")
@endpoint_option
@token_file_option
@log_options("warning")
def follow(
    *,
    url: str,
    tables: tuple[str, ...],
    exclude: tuple[str, ...],
    database: str | None,
    name: str | None,
    password_file: Path | None,
    keyless: str,
    bucket_num: int,
    snapshot: bool,
    endpoint: str | None,
    token_file: Path | None,
    log_level: str,
    log_format: str,
) -> None:
    """Follow the tables of the database at URL until stopped."""
    address = _address(url, password_file)
    from streamhouse.cdc_source.follower import Follower  # noqa: PLC0415 - `--help` does not wait for pyarrow
    from streamhouse.cdc_source.stream_options import StreamOptions  # noqa: PLC0415 - `--help` does not wait for pyarrow

    configure_logging(log_level, log_format)
    target_database = database or address.database
    options = StreamOptions(
        patterns=_patterns(tables),
        exclude=_patterns(exclude),
        database=target_database,
        name=_stream_name(name, target_database),
        bucket_count=bucket_num,
        keyless=keyless == "append",
        snapshot=snapshot,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        Follower(client, address, options, say=_reporter(log_format)).run(stop)


@command.command("drop")
@_source
@_database_option
@_name_option
@_password_file_option
@endpoint_option
@token_file_option
@json_option
def drop(
    *,
    url: str,
    database: str | None,
    name: str | None,
    password_file: Path | None,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Drop slot and publication in the database at URL; the Streamhouse tables stay as they are."""
    address = _address(url, password_file)
    from streamhouse.cdc_source.follower import drop_stream  # noqa: PLC0415 - `--help` does not wait for pyarrow

    target_database = database or address.database
    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        stream = _stream_name(name, target_database)
        had_slot = drop_stream(client, address, database=target_database, name=stream)
    if is_json:
        print_json({"name": f"streamhouse_{stream}", "is_dropped": had_slot})
        return
    click.echo(
        f"dropped streamhouse_{stream}" if had_slot else f"there was no slot streamhouse_{stream}"
    )


def _reporter(log_format: str) -> Callable[[str], None]:
    """Return the function that reports progress: text on stderr, or lines of the JSON log."""
    if log_format == "text":
        return lambda text: click.echo(text, err=True)
    _logger.setLevel(logging.INFO)
    return lambda text: _logger.info("event=said what=%r", text)


def _address(url: str, password_file: Path | None) -> SourceAddress:
    from streamhouse.cdc_source.source_address import SourceAddress, hide_password  # noqa: PLC0415 - `--help` does not wait for pyarrow

    password = hide_password(sys.orig_argv)
    if password_file is not None:
        password = read_secret(password_file, kind="password")
    return SourceAddress.parse(url, password=password)


def _patterns(texts: tuple[str, ...]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _stream_name(name_option: str | None, database: str) -> str:
    name = name_option or database.lower()
    if not _STREAM_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"the name of a stream is 1 to 48 of a-z, 0-9 and _, not '{name}': give one with --name"
        )
    return name
