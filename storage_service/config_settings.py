"""The settings of a service process: the options of `streamhouse serve` except the limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamhouse.storage_service.config_option import Kind, setting
from streamhouse.storage_service.ownership.journal.names import DEFAULT_SHARD

__all__ = [
    "CATALOG_ACCESS",
    "DEFAULT_CATALOG_NAME",
    "DEFAULT_PORT",
    "JOURNAL",
    "JOURNAL_ACKS",
    "KAFKA",
    "ServiceSettings",
]

DEFAULT_PORT: Final = 8765
DEFAULT_CATALOG_NAME: Final = "streamhouse"
CATALOG_ACCESS: Final = ("direct", "service")
JOURNAL_ACKS: Final = ("journal", "disk")
SERVICE: Final = "Service"
ACCESS: Final = "Access"
TLS: Final = "TLS"
LAKE: Final = "Lake"
DISK: Final = "Disk and damage"
JOURNAL: Final = "Journal"
KAFKA: Final = "Kafka clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The settings of a process; `ServiceConfig` adds the limits and the checks."""

    data_dir: Path = setting(
        SERVICE,
        "--data-dir",
        "The directory of all data; made if it does not exist.",
        default=dataclasses.MISSING,
        kind=Kind.DIRECTORY,
    )
    host: str = setting(SERVICE, "--host", "Address to listen on.", default="127.0.0.1")
    port: int = setting(
        SERVICE, "--port", "0 picks a free port.", default=DEFAULT_PORT, kind=Kind.NUMBER
    )
    readers: int = setting(
        SERVICE,
        "--readers",
        "Processes that answer reads beside this one, each with a copy of the rows by key in"
        " memory; needs Linux, and no TLS.",
        default=0,
        kind=Kind.NUMBER,
        metavar="N",
    )
    token: str | None = setting(
        ACCESS,
        "--token-file",
        "File with the bearer token that callers must send; needed beyond loopback.",
        kind=Kind.SECRET,
        is_shown=False,
    )
    grants_file: Path | None = setting(
        ACCESS,
        "--grants",
        "TOML file with hashes of tokens and what each may do; read again when it changes.",
        kind=Kind.FILE,
    )
    allowed_hosts: tuple[str, ...] = setting(
        ACCESS,
        "--allowed-host",
        "Another host name of this service, as of a load balancer before it; may be repeated.",
        default=(),
        kind=Kind.LIST,
        metavar="NAME",
    )
    tls_certificate_file: Path | None = setting(
        TLS,
        "--tls-cert",
        "PEM file with the certificate and its chain: the service then speaks HTTPS only.",
        kind=Kind.FILE,
    )
    tls_key_file: Path | None = setting(
        TLS, "--tls-key", "PEM file with the certificate's private key.", kind=Kind.FILE
    )
    tls_key_password: str | None = setting(
        TLS,
        "--tls-key-password-file",
        "File with the password of the private key, if it has one.",
        kind=Kind.SECRET,
        is_shown=False,
    )
    catalog_name: str = setting(
        LAKE, "--catalog", "Name of the Iceberg catalog.", default=DEFAULT_CATALOG_NAME
    )
    catalog_properties: Mapping[str, str] = setting(
        LAKE,
        "--catalog-property",
        "pyiceberg catalog property, a secret one as KEY=@file:PATH or KEY=@env:NAME; default:"
        " SQLite in the data directory.",
        default=dict,
        kind=Kind.LIST,
        metavar="KEY=VALUE",
        is_shown=False,
    )
    catalog_access: str = setting(
        LAKE,
        "--catalog-access",
        "service: tiering and readers reach the catalog through this service's /iceberg.",
        default="direct",
        choices=CATALOG_ACCESS,
    )
    warehouse: str | None = setting(
        LAKE,
        "--warehouse",
        "Where lake tables go, as in s3://bucket/folder.",
        metavar="URI",
    )
    disk_bytes_max: int | None = setting(
        DISK,
        "--disk-max",
        "Most bytes that rows may take, as in 100GiB.",
        kind=Kind.SIZE,
        metavar="SIZE",
    )
    is_strict: bool = setting(
        DISK,
        "--strict",
        "Do not start while any table is damaged.",
        default=False,
        kind=Kind.SWITCH,
    )
    journal_url: str | None = setting(
        JOURNAL,
        "--journal",
        "Where every durable change is kept besides the disk, as in s3://bucket/folder.",
        metavar="URL",
    )
    shard: str = setting(
        JOURNAL,
        "--shard",
        "Which shard of the journal this process serves.",
        default=DEFAULT_SHARD,
        metavar="NAME",
    )
    journal_ack: str = setting(
        JOURNAL,
        "--journal-ack",
        "A write is answered when the journal has it, or when this disk has it.",
        default="journal",
        choices=JOURNAL_ACKS,
    )
    is_standby: bool = setting(
        JOURNAL,
        "--standby",
        "Follow the owner of the shard, and take over when it is gone.",
        default=False,
        kind=Kind.SWITCH,
    )
    advertised_endpoint: str | None = setting(
        JOURNAL,
        "--advertise",
        "Where others reach this process, if not at the address it listens on.",
        metavar="URL",
    )
    kafka_port: int | None = setting(
        KAFKA,
        "--kafka-port",
        "Serve Kafka clients, too, at this port; 0 picks a free one.",
        kind=Kind.NUMBER,
        metavar="PORT",
    )
    kafka_advertised: str | None = setting(
        KAFKA,
        "--kafka-advertise",
        "Where Kafka clients reach this process, if not at the address it listens on; with"
        " TLS a name of the certificate.",
        metavar="HOST:PORT",
    )
    kafka_auto_create: bool = setting(
        KAFKA,
        "--kafka-auto-create",
        "Whether clients make a topic by asking for it, as auto.create.topics.enable.",
        default=True,
        kind=Kind.TRUTH,
        metavar="true|false",
    )
