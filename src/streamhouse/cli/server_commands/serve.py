"""`streamhouse serve`: the storage service as a process."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from streamhouse.cli.log_options import log_options
from streamhouse.cli.option_values import SIZE, MeasureType
from streamhouse.cli.server_commands.embedded_tiering import start_tiering
from streamhouse.cli.server_commands.start_lines import start_lines
from streamhouse.cli.server_commands.supervisor import (
    is_supervised,
    shard_commands,
    stop_with_supervisor,
    supervise,
)
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.log_lines import configure_logging
from streamhouse.core.model.lake.facts import s3_properties_from_environment
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.values.units import parse_bytes
from streamhouse.core.secret_sources import catalog_properties_from, read_secret
from streamhouse.storage_service.config import ServiceConfig, kafka_address
from streamhouse.storage_service.config_option import Kind, Setting
from streamhouse.storage_service.ownership.journal.names import DEFAULT_SHARD

__all__ = ["command", "help_sections"]

_F = TypeVar("_F", bound=Callable[..., Any])


_ARGUMENTS: Final = "streamhouse.serve.arguments"
# The supervisor sets these options for each shard.
_PER_SHARD: Final = ("--data-dir", "--port", "--shards", "--kafka-port", "--kafka-advertise")

# Heading -> options of the command that are no part of the service's configuration.
_OF_COMMAND: Final[Mapping[str, tuple[str, ...]]] = {
    "Service": ("log_level", "log_format"),
    "Lake": ("lake_credentials", "tiering"),
    "Disk and damage": ("rebuild",),
    "Journal": ("shards",),
}
_PATHS: Final = (Kind.FILE, Kind.SECRET)
_SECRET_NAMES: Final = {"token": "token", "tls_key_password": "password"}


class _ServeCommand(click.Command):
    """Shows its options under headings; keeps the arguments for the shards."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments of the command line, then parse the arguments."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every section, and the options of no section at the end."""
        records = {p.name: record for p in self.params if (record := p.get_help_record(ctx))}
        for title, names in help_sections().items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl([*records.values(), *self._help_record(ctx)])

    def _help_record(self, ctx: click.Context) -> list[tuple[str, str]]:
        option = self.get_help_option(ctx)
        record = None if option is None else option.get_help_record(ctx)
        return [] if record is None else [record]


def help_sections() -> dict[str, list[str]]:
    """Return heading -> the names of the options below the heading."""
    sections: dict[str, list[str]] = {}
    for setting in ServiceConfig.settings():
        sections.setdefault(setting.section, []).append(setting.name)
    for title, names in _OF_COMMAND.items():
        sections[title] += names
    for limit in ServiceConfig.options():
        sections.setdefault(limit.section, []).append(limit.name)
    return sections


def _setting_options(command: _F) -> _F:
    for setting in reversed(ServiceConfig.settings()):
        command = _setting_option(setting)(command)
    return command


def _setting_option(setting: Setting) -> Callable[[_F], _F]:
    kind, arguments = setting.kind, dict[str, Any]()
    if kind in _PATHS or kind is Kind.DIRECTORY:
        is_file = kind in _PATHS
        arguments["type"] = click.Path(dir_okay=not is_file, file_okay=is_file, path_type=Path)
    elif kind is Kind.SIZE:
        arguments["type"] = SIZE
    elif setting.choices:
        arguments["type"] = click.Choice(setting.choices)
    elif kind in (Kind.NUMBER, Kind.TRUTH):
        arguments["type"] = int if kind is Kind.NUMBER else bool
    if kind is Kind.SWITCH:
        arguments["is_flag"] = True
    elif kind is Kind.LIST:
        arguments["multiple"] = True
    elif setting.default is dataclasses.MISSING:
        arguments["required"] = True
    elif setting.default is not None:
        arguments |= {"default": setting.default, "show_default": True}
    return click.option(
        setting.flag, setting.name, metavar=setting.metavar, help=setting.help, **arguments
    )


def _limit_options(command: _F) -> _F:
    for option in reversed(ServiceConfig.options()):
        text = f"{option.help} [{option.written(option.default)}]"
        kind = MeasureType("number", option.parse)
        command = click.option(
            *(option.flag, option.name),
            metavar="N",
            type=kind,
            # As a person writes the value: `streamhouse config` shows this text.
            default=option.written(option.default),
            help=text,
        )(command)
    return command


@click.command("serve", cls=_ServeCommand)
@_setting_options
@click.option(
    "--lake-credentials",
    type=click.Choice(["own", "shared"]),
    default="own",
    show_default=True,
    help="shared: AWS_* variables of this process reach tokens with the grant read:lake; own: each"
    " process has its own.",
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
    "--shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run this many shards, each as a process with a directory below --data-dir.",
)
@log_options("info")
@_limit_options
def command(
    *,
    lake_credentials: str,
    tiering: str,
    rebuild: tuple[str, ...],
    shards: int | None,
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Run the storage service until SIGTERM or Ctrl-C.

    Prints `streamhouse listening on URL` when it takes requests, then where the page and the data
    are, and whether it moves rows into Iceberg. Numbers may be sizes (64MiB) or
    durations (30s) where the unit is bytes or ms.
    """
    configure_logging(log_level, log_format)
    config = _config(
        options,
        is_lake_shared=lake_credentials == "shared",
        is_token_needed=options["grants_file"] is not None and tiering == "embedded",
    )
    tables = frozenset(TablePath.parse(text) for text in rebuild)
    # A supervised shard shares the supervisor's environment and file, which set `--shards`, too.
    if shards is not None and not is_supervised():
        return _serve_shards(config, shards, is_tiering=tiering == "embedded")
    _serve_one(config, rebuild=tables, is_tiering=tiering == "embedded")


def _config(
    options: dict[str, Any], *, is_lake_shared: bool, is_token_needed: bool
) -> ServiceConfig:
    """Return the configuration of the options; secrets are read from their files.

    With `is_token_needed` a service without a token file gets a random token.
    """
    limits = {limit.name: options.pop(limit.name) for limit in ServiceConfig.options()}
    for setting in ServiceConfig.settings():
        text = options[setting.name]
        if setting.kind is Kind.SECRET and text is not None:
            options[setting.name] = read_secret(text, kind=_SECRET_NAMES[setting.name])
        elif setting.kind is Kind.SIZE and text is not None:
            options[setting.name] = parse_bytes(text, name=setting.flag)
    if is_token_needed and options["token"] is None:
        options["token"] = secrets.token_urlsafe(32)
    properties = catalog_properties_from(
        options.pop("catalog_properties"), is_listed=_is_on_command_line("catalog_properties")
    )
    if is_lake_shared:
        properties = {**s3_properties_from_environment(os.environ), **properties}
    return ServiceConfig.from_texts(limits, **options, catalog_properties=properties)


def _serve_one(config: ServiceConfig, *, rebuild: frozenset[TablePath], is_tiering: bool) -> None:
    """Run the only process of a service, or the process of a shard."""
    from streamhouse.storage_service.door_table import doors_of  # noqa: PLC0415 - a wrong option fails before the service loads
    from streamhouse.storage_service.server.listener import run_service  # noqa: PLC0415 - a wrong option fails before the service loads

    is_shard = is_supervised()
    stop_with_supervisor()
    doors = doors_of(config)
    served: list[str] = []
    waiting = [door for door in doors if door.port is not None]

    def describe(endpoint: str) -> None:
        # Below the lines that programs wait for: the endpoint and the further doors.
        if not (waiting or is_shard):
            click.echo(start_lines(endpoint, config.data_dir, is_tiering=is_tiering))
        sys.stdout.flush()

    def on_ready(endpoint: str) -> Callable[[], None]:
        stop = start_tiering(endpoint, config) if is_tiering else _nothing
        click.echo(f"streamhouse listening on {endpoint}")
        served.append(endpoint)
        describe(endpoint)
        return stop

    def on_standby(endpoint: str) -> None:
        click.echo(f"streamhouse standing by on {endpoint}")
        sys.stdout.flush()

    def on_door(announcement: str) -> None:
        click.echo(f"streamhouse {announcement}")
        waiting.pop()
        describe(served[0])

    run_service(
        config,
        doors=doors,
        on_ready=on_ready,
        on_standby=on_standby,
        on_door=on_door,
        rebuild=rebuild,
    )


def _serve_shards(config: ServiceConfig, count: int, *, is_tiering: bool) -> None:
    """Run the shards of this machine, with the arguments of this command."""
    for flag, is_set in (
        ("--shard", config.shard != DEFAULT_SHARD),
        ("--standby", config.is_standby),
        ("--advertise", config.advertised_endpoint is not None),
    ):
        if is_set:
            raise InvalidRequestError(f"{flag} is of one shard: it cannot be given with --shards")
    if config.journal_url is None:
        raise InvalidRequestError("--shards needs --journal: it has which shard has which table")
    is_elsewhere = config.catalog_properties and not _is_on_command_line("catalog_properties")
    if is_elsewhere and not config.has_own_catalog:
        # The shards get their common catalog by options, which replace all other sources.
        raise InvalidRequestError(
            "--shards without a catalog takes --catalog-property from the command line only: name"
            " the catalog, or give the properties there"
        )
    from streamhouse.storage_service.ownership.journal.store.store_opening import refuse_within  # noqa: PLC0415 - a wrong option fails before the service loads

    refuse_within(config.journal_url, config.data_dir)
    arguments = _without_flags(click.get_current_context().meta[_ARGUMENTS], _PER_SHARD)
    (config.data_dir / "lake" / "warehouse").mkdir(parents=True, exist_ok=True)
    config.data_dir.chmod(0o700)
    supervise(
        shard_commands(
            arguments,
            count=count,
            data_dir=config.data_dir,
            has_own_catalog=config.has_own_catalog,
            has_warehouse=config.warehouse is not None,
            kafka_port=config.kafka_port,
            kafka_advertised=None
            if config.kafka_advertised is None
            else kafka_address(config.kafka_advertised),
        ),
        host=config.host,
        port=config.port,
        scheme="http" if config.tls_certificate_file is None else "https",
        is_kafka=config.kafka_port is not None,
        described=functools.partial(start_lines, data_dir=config.data_dir, is_tiering=is_tiering),
        program=(sys.executable, "-c", "from streamhouse.cli import main; main()", "serve"),
    )


def _is_on_command_line(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _without_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the arguments without the flags and their values."""
    remaining, is_value = [], False
    for text in arguments:
        if is_value:
            is_value = False
        elif text in flags:
            is_value = True
        elif text.partition("=")[0] not in flags:
            remaining.append(text)
    return remaining


def _nothing() -> None:
    """There is nothing to stop."""
