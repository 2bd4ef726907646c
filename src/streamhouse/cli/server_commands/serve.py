"""`streamhouse serve`: the storage service as a process."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from streamhouse.cli.log_options import log_options
from streamhouse.cli.option_values import SIZE, MeasureType
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
from streamhouse.core.model.table_state import EMBEDDED_WORKER_ID
from streamhouse.core.model.values.units import parse_bytes
from streamhouse.core.secret_sources import catalog_properties_from, read_secret
from streamhouse.storage_service.config import (
    CATALOG_ACCESS,
    DEFAULT_CATALOG_NAME,
    DEFAULT_PORT,
    JOURNAL_ACKS,
    KAFKA,
    ServiceConfig,
    kafka_address,
)
from streamhouse.storage_service.ownership.journal.names import DEFAULT_SHARD

__all__ = ["command", "help_sections"]

_F = TypeVar("_F", bound=Callable[..., Any])


# Each of these options is a field of the configuration, with the value unchanged.
_JOURNAL: Final = ("journal_url", "shard", "journal_ack", "is_standby", "advertised_endpoint")

_KAFKA: Final = ("kafka_port", "kafka_advertised", "kafka_auto_create")
_UNPARSED: Final = (*_JOURNAL, *_KAFKA)

_ARGUMENTS: Final = "streamhouse.serve.arguments"
# The supervisor sets these options for each shard.
_PER_SHARD: Final = ("--data-dir", "--port", "--shards", "--kafka-port", "--kafka-advertise")

# Heading -> the options that `--help` shows below it; the limits follow.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Service": ("data_dir", "host", "port", "log_level", "log_format"),
    "Access": ("token_file", "grants_file", "allowed_hosts"),
    "TLS": ("tls_certificate_file", "tls_key_file", "tls_key_password_file"),
    "Lake": (
        *("catalog_name", "catalog_properties", "catalog_access"),
        *("warehouse", "lake_credentials", "tiering"),
    ),
    "Disk and damage": ("disk_max", "is_strict", "rebuild"),
    "Journal": (*_JOURNAL, "shards"),
    KAFKA: _KAFKA,
}


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
    sections = {title: list(names) for title, names in _SECTIONS.items()}
    for option in ServiceConfig.options():
        sections.setdefault(option.section, []).append(option.name)
    return sections


def _limit_options(command: _F) -> _F:
    for option in reversed(ServiceConfig.options()):
        text = f"{option.help} [{option.written(option.default)}]"
        kind = MeasureType("number", option.parse)
        command = click.option(
            *(option.flag, option.name),
            metavar="N",
            type=kind,
            # The default in its written form: `streamhouse config` shows the value in force.
            default=option.written(option.default),
            help=text,
        )(command)
    return command


def _journal_options(command: _F) -> _F:
    options = (
        click.option(
            "--journal",
            "journal_url",
            metavar="URL",
            help="Where every durable change is kept besides the disk, as in s3://bucket/folder.",
        ),
        click.option(
            "--shard",
            default=DEFAULT_SHARD,
            show_default=True,
            metavar="NAME",
            help="Which shard of the journal this process serves.",
        ),
        click.option(
            "--shards",
            type=click.IntRange(min=1),
            metavar="N",
            help="Run this many shards, each as a process with a directory below --data-dir.",
        ),
        click.option(
            "--journal-ack",
            type=click.Choice(JOURNAL_ACKS),
            default="journal",
            show_default=True,
            help="A write is answered when the journal has it, or when this disk has it.",
        ),
        click.option(
            "--standby",
            "is_standby",
            is_flag=True,
            help="Follow the owner of the shard, and take over when it is gone.",
        ),
        click.option(
            "--advertise",
            "advertised_endpoint",
            metavar="URL",
            help="Where others reach this process, if not at the address it listens on.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _kafka_options(command: _F) -> _F:
    options = (
        click.option(
            "--kafka-port",
            type=int,
            metavar="PORT",
            help="Serve Kafka clients, too, at this port; 0 picks a free one.",
        ),
        click.option(
            "--kafka-advertise",
            "kafka_advertised",
            metavar="HOST:PORT",
            help="Where Kafka clients reach this process, if not at the address it listens on; with"
            " TLS a name of the certificate.",
        ),
        click.option(
            "--kafka-auto-create",
            type=bool,
            metavar="true|false",
            default=True,
            show_default=True,
            help="Whether clients make a topic by asking for it, as auto.create.topics.enable.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("serve", cls=_ServeCommand)
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory of all data; made if it does not exist.",
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
    "--grants",
    "grants_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with hashes of tokens and what each may do; read again when it changes.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Another host name of this service, as of a load balancer before it; may be repeated.",
)
@click.option(
    "--tls-cert",
    "tls_certificate_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file with the certificate and its chain: the service then speaks HTTPS only.",
)
@click.option(
    "--tls-key",
    "tls_key_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file with the certificate's private key.",
)
@click.option(
    "--tls-key-password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the password of the private key, if it has one.",
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
    help="pyiceberg catalog property, a secret one as KEY=@file:PATH or KEY=@env:NAME; default:"
    " SQLite in the data directory.",
)
@click.option(
    "--catalog-access",
    type=click.Choice(CATALOG_ACCESS),
    default="direct",
    show_default=True,
    help="service: tiering and readers reach the catalog through this service's /iceberg.",
)
@click.option("--warehouse", metavar="URI", help="Where lake tables go, as in s3://bucket/folder.")
@click.option(
    "--disk-max", metavar="SIZE", type=SIZE, help="Most bytes that rows may take, as in 100GiB."
)
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
    "--strict", "is_strict", is_flag=True, help="Do not start while any table is damaged."
)
@log_options("info")
@_journal_options
@_kafka_options
@_limit_options
def command(
    *,
    data_dir: Path,
    host: str,
    port: int,
    token_file: Path | None,
    grants_file: Path | None,
    allowed_hosts: tuple[str, ...],
    tls_certificate_file: Path | None,
    tls_key_file: Path | None,
    tls_key_password_file: Path | None,
    catalog_name: str,
    catalog_properties: tuple[str, ...],
    catalog_access: str,
    warehouse: str | None,
    disk_max: str | None,
    lake_credentials: str,
    tiering: str,
    rebuild: tuple[str, ...],
    is_strict: bool,
    log_level: str,
    log_format: str,
    shards: int | None,
    **options: Any,
) -> None:
    """Run the storage service until SIGTERM or Ctrl-C.

    Prints `streamhouse listening on URL` when it takes requests. Numbers may be sizes (64MiB) or
    durations (30s) where the unit is bytes or ms.
    """
    configure_logging(log_level, log_format)
    properties = catalog_properties_from(
        catalog_properties, is_listed=_is_on_command_line("catalog_properties")
    )
    if lake_credentials == "shared":
        properties = {**s3_properties_from_environment(os.environ), **properties}
    config = ServiceConfig.from_texts(
        {
            name: text
            for name, text in options.items()
            if text is not None and name not in _UNPARSED
        },
        data_dir=data_dir,
        host=host,
        port=port,
        token=_service_token(token_file, needed=grants_file is not None and tiering == "embedded"),
        grants_file=grants_file,
        allowed_hosts=allowed_hosts,
        tls_certificate_file=tls_certificate_file,
        tls_key_file=tls_key_file,
        tls_key_password=_optional_secret(tls_key_password_file, "password"),
        catalog_name=catalog_name,
        catalog_properties=properties,
        catalog_access=catalog_access,
        warehouse=warehouse,
        is_strict=is_strict,
        **{name: options[name] for name in _UNPARSED},
        disk_bytes_max=None if disk_max is None else parse_bytes(disk_max, name="--disk-max"),
    )
    tables = frozenset(TablePath.parse(text) for text in rebuild)
    # A supervised shard shares the supervisor's environment and file, which set `--shards`, too.
    if shards is not None and not is_supervised():
        return _serve_shards(config, shards)
    _serve_one(config, rebuild=tables, is_tiering=tiering == "embedded")


def _serve_one(config: ServiceConfig, *, rebuild: frozenset[TablePath], is_tiering: bool) -> None:
    """Run the only process of a service, or the process of a shard."""
    # Not at the top: a wrong option fails before the whole service is imported.
    from streamhouse.storage_service.door_table import doors_of
    from streamhouse.storage_service.server.listener import run_service

    stop_with_supervisor()

    def on_ready(endpoint: str) -> Callable[[], None]:
        stop = _start_tiering(endpoint, config) if is_tiering else _nothing
        click.echo(f"streamhouse listening on {endpoint}")
        sys.stdout.flush()
        return stop

    def on_standby(endpoint: str) -> None:
        click.echo(f"streamhouse standing by on {endpoint}")
        sys.stdout.flush()

    def on_door(announcement: str) -> None:
        click.echo(f"streamhouse {announcement}")
        sys.stdout.flush()

    run_service(
        config,
        doors=doors_of(config),
        on_ready=on_ready,
        on_standby=on_standby,
        on_door=on_door,
        rebuild=rebuild,
    )


def _serve_shards(config: ServiceConfig, count: int) -> None:
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
    # Not at the top, as in `_serve_one`.
    from streamhouse.storage_service.ownership.journal.store.store_opening import refuse_within

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


def _start_tiering(endpoint: str, config: ServiceConfig) -> Callable[[], None]:
    from streamhouse.client.http.own_certificate import OWN_CERTIFICATE
    from streamhouse.tiering.worker.embedded import EmbeddedTieringWorker

    if config.tls_certificate_file is not None:
        # The certificate need not name the address that this process uses for itself.
        endpoint += f"#sha256={OWN_CERTIFICATE}"
    worker = EmbeddedTieringWorker(
        endpoint=endpoint, token=config.token, worker_id=EMBEDDED_WORKER_ID
    )
    worker.start()
    return worker.stop


def _nothing() -> None:
    """There is nothing to stop."""


def _service_token(path: Path | None, *, needed: bool) -> str | None:
    """Return the token of the service's owner; if `needed` and unset, a random token."""
    if path is None and needed:
        return secrets.token_urlsafe(32)
    return _optional_secret(path, "token")


def _optional_secret(path: Path | None, kind: str) -> str | None:
    return None if path is None else read_secret(path, kind=kind)
