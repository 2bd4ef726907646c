"""The service's configuration: every limit with default, unit and meaning, in one frozen object.

Only the command line reads a configuration from text (`ServiceConfig.from_texts`); all other code
gets the object. A test compares `docs/configuration.md` with this module.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    UnknownOptionError,
    suggestion,
)
from streamhouse.core.model.lake.facts import (
    CATALOG_TIMEOUT_PROPERTY,
    LAKE_PATHS_PROPERTY,
    REST_CATALOG_PATH,
    LakeCatalog,
    is_rest_catalog,
)
from streamhouse.storage_service.config_option import (
    Limit,
    Setting,
    fixed,
    limit,
    settings_of,
)
from streamhouse.storage_service.config_settings import (
    CATALOG_ACCESS,
    JOURNAL,
    JOURNAL_ACKS,
    KAFKA,
    ServiceSettings,
)
from streamhouse.storage_service.log.segments.segment_format import PAYLOAD_BYTES_LIMIT
from streamhouse.storage_service.ownership.journal.lease import LEASE_MS_MAX, OWNER_URL
from streamhouse.storage_service.ownership.journal.names import DEFAULT_SHARD, ShardNames

__all__ = ["ServiceConfig", "kafka_address"]

ANY_HOST: Final = "*"
"""As an allowed host: every host name is accepted."""
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}", re.ASCII)
SHARED_SOCKET_VARIABLE: Final = "STREAMHOUSE_SHARED_SOCKET"
"""The descriptor of a socket shared by several shards; each shard also has its own socket."""
_ADVERTISED_HOST: Final = re.compile(r"[A-Za-z0-9_.:-]{1,253}", re.ASCII)
_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "[::]", "")
_MIB: Final = 1 << 20
_READERS_MAX: Final = 64
MEMORY: Final = "Memory limits"
CONNECTIONS: Final = "Connection limits"
TABLES: Final = "Table limits"
THREADS: Final = "Threads"
TIERING: Final = "Tiering and catalog"
_IMPL: Final = "py-catalog-impl"
_CATALOG_KIND_PROPERTIES: Final = ("type", "uri", _IMPL)
# The properties for access to files, needed with any catalog.
_FILE_PROPERTIES: Final = (
    *("s3.", "client.", "gcs.", "adls.", "hdfs.", "py-io-impl", "warehouse"),
    LAKE_PATHS_PROPERTY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig(ServiceSettings):
    """The configuration of one service process, checked as a whole.

    Without `token` and `grants_file` every caller is trusted, and only a loopback `host` is valid.
    """

    body_bytes_max: int = limit(MEMORY, 64 * _MIB, "bytes", "Largest body of an append.")
    bodies_bytes_max: int = limit(
        MEMORY,
        512 * _MIB,
        "bytes",
        "Most memory for request bodies in transfer or in progress; further bodies wait.",
    )
    answers_bytes_max: int = limit(
        MEMORY,
        512 * _MIB,
        "bytes",
        "Most memory for answers in preparation or not sent yet; a caller holds at most as much"
        " as stays free.",
    )
    commit_queue_bytes_max: int = limit(
        MEMORY, 256 * _MIB, "bytes", "Most appended bytes waiting for the disk; more are refused."
    )
    key_memory_bytes_max: int = limit(
        MEMORY,
        2_048 * _MIB,
        "bytes",
        "Most memory for the rows of all primary key tables at hand, and for changes waiting"
        " for RocksDB; shared by their buckets.",
    )
    key_cache_bytes_max: int = limit(
        MEMORY,
        256 * _MIB,
        "bytes",
        "Most memory for the rows of a primary key table's bucket at hand.",
    )
    connections_max: int = limit(
        CONNECTIONS,
        10_000,
        "connections",
        "Most open connections; at the limit a new connection replaces the connection with the"
        " longest idle time.",
    )
    open_requests_max: int = limit(
        CONNECTIONS, 5_000, "requests", "Most requests in progress, waiting ones included."
    )
    keep_alive_timeout_ms: int = limit(
        CONNECTIONS,
        75_000,
        "ms",
        "How long a connection may be idle, or take to send a request's headers.",
    )
    body_read_timeout_ms: int = limit(
        CONNECTIONS, 30_000, "ms", "How long receiving a request body may take."
    )
    answer_stall_timeout_ms: int = limit(
        CONNECTIONS, 60_000, "ms", "How long an answer waits for a client to read."
    )
    drain_timeout_ms: int = limit(
        CONNECTIONS, 15_000, "ms", "How long a stopping service waits for requests in progress."
    )
    tables_max: int = limit(TABLES, 1_000, "tables", "Most tables.")
    buckets_max: int = limit(
        TABLES, 8_192, "buckets", "Most buckets over all tables; each has files open."
    )
    retention_interval_ms: int = limit(
        TABLES, 60_000, "ms", "How often expired log segments are deleted."
    )
    disk_check_interval_ms: int = limit(
        TABLES, 1_000, "ms", "How often the size of rows on disk is compared with --disk-max."
    )
    transaction_bytes_max: int = limit(
        TABLES,
        128 << 30,
        "bytes",
        "Most staged bytes of all tables, not yet committed or aborted.",
    )
    transaction_timeout_ms: int = limit(
        TABLES,
        3_600_000,
        "ms",
        "How long a transaction may be idle without a timeout of its own.",
    )
    worker_threads: int = limit(
        THREADS,
        4,
        "threads",
        "Threads for appends and fetches off the event loop.",
    )
    key_threads: int = limit(
        THREADS,
        2,
        "threads",
        "Threads for large writes to primary key tables, and for the work on their files.",
    )
    catalog_threads: int = limit(
        THREADS, 4, "threads", "Threads that answer requests to `/iceberg`."
    )
    live_bytes_max: int = limit(
        TIERING,
        64 << 30,
        "bytes",
        "Most bytes of the files of live tables' cuts, which are deleted 30 minutes after they were"
        " made; no more are written at the limit.",
    )
    tiering_lease_ms: int = limit(
        TIERING, 30_000, "ms", "How long a tiering round stays claimed after the last heartbeat."
    )
    tiering_backoff_ms_min: int = limit(
        TIERING, 1_000, "ms", "Pause of a table after a failed round."
    )
    catalog_timeout_ms: int = limit(
        TIERING,
        60_000,
        "ms",
        "How long a request to a REST catalog waits for an answer: requests of this service, of"
        " tiering workers and of readers.",
    )
    journal_linger_ms: int = limit(
        JOURNAL,
        2,
        "ms",
        "How long an object of the journal collects entries; a longer time makes fewer objects.",
    )
    journal_lag_max_ms: int = limit(
        JOURNAL,
        1_000,
        "ms",
        "With --journal-ack disk: how far the journal may be behind before writes wait.",
    )
    lease_ms: int = limit(
        JOURNAL,
        10_000,
        "ms",
        "How long the owner of a shard may be silent before another process takes over.",
    )

    kafka_partitions: int = limit(
        KAFKA, 1, "partitions", "Buckets of a topic created without a number of partitions."
    )

    # Limits without an option, because the default was always enough; tests set small values.
    # Enough for a table of 2,000 columns and 10,000 nested fields.
    control_body_bytes_max: int = fixed(
        4 * _MIB, "bytes", "Largest JSON body, such as a table's descriptor."
    )
    # A body of 64 MiB has so many rows of 16 bytes.
    append_rows_max: int = fixed(4_000_000, "rows", "Most rows in one append request.")
    # Each batch is a separate frame; a frame of few rows costs more than the rows.
    append_batches_max: int = fixed(4_096, "batches", "Most record batches in one append request.")
    # Half of a body: a reader decodes a whole batch at once.
    batch_bytes_max: int = fixed(32 * _MIB, "bytes", "Largest record batch of an append.")
    # As much as the largest body, so that any batch can be read.
    fetch_bytes_max: int = fixed(
        64 * _MIB, "bytes", "Upper bound of a fetch's max_bytes; a larger value is lowered to this."
    )
    # Less than `keep_alive_timeout_ms`, after which a silent connection is closed.
    fetch_wait_ms_max: int = fixed(
        60_000, "ms", "Upper bound of a long poll's max_wait_ms; a larger value is lowered to this."
    )
    # The default of a Kafka broker: clients need no new connection for each batch of rows.
    kafka_idle_timeout_ms: int = fixed(
        600_000, "ms", "How long a connection of a Kafka client may be idle."
    )
    # Enough for a producer that does not wait for acknowledgements.
    kafka_pipelined_max: int = fixed(
        8, "requests", "Most writes of one connection of a Kafka client in progress."
    )
    # One address leaves a fifth of all connections to the others.
    address_connections_max: int = fixed(
        8_000, "connections", "Most open connections from one client address."
    )
    # Long polls leave a fifth of all requests to the others.
    waiting_fetches_max: int = fixed(4_000, "requests", "Most long polls waiting for new rows.")
    # With `subscription_page_bytes_max` all subscriptions hold at most a gigabyte.
    subscriptions_max: int = fixed(1_000, "subscriptions", "Most open subscriptions.")
    # Often enough to notice a client that has gone.
    subscription_heartbeat_ms: int = fixed(
        3_000, "ms", "How often a subscription without new rows gets an empty answer."
    )
    # See `subscriptions_max`.
    subscription_page_bytes_max: int = fixed(
        1 * _MIB, "bytes", "Most bytes that a subscription reads ahead of the client."
    )
    # As many as tables.
    databases_max: int = fixed(1_000, "databases", "Most databases.")
    # A frame of fewer rows costs more than the spreading gains.
    spread_rows_min: int = fixed(
        2_000, "rows", "Fewest rows a bucket gets when the service spreads an append evenly."
    )
    # Decoding 1 MiB takes 0.3 ms; waking a thread for it costs more than that on a busy machine.
    inline_bytes_max: int = fixed(
        1 * _MIB, "bytes", "Larger appends and fetches are handled off the event loop."
    )
    # Sixteen for each thread at the default.
    catalog_requests_max: int = fixed(
        64, "requests", "Most requests to `/iceberg` in progress or waiting for a thread."
    )
    # A lookup is answered in one piece, so the limit is below the rows of an append.
    lookup_keys_max: int = fixed(1_000_000, "keys", "Most keys in one lookup.")
    # A prefix may have any number of rows, so the limit is below the limit of keys.
    lookup_rows_max: int = fixed(
        100_000, "rows", "Most rows of a prefix lookup, over all prefixes."
    )
    # The number of concurrent writers of a table, including writers that died.
    transactions_open_max: int = fixed(
        1_000, "transactions", "Most open transactions of a table, not committed or aborted."
    )
    # Each task of a Spark job stages a part.
    transaction_parts_max: int = fixed(100_000, "parts", "Most staged parts of one transaction.")
    # Half of the limit of all tables.
    transaction_table_bytes_max: int = fixed(
        64 << 30, "bytes", "Most staged bytes of a table, not yet committed or aborted."
    )
    # A day: longer ones hold staged rows for writers that are gone.
    transaction_timeout_ms_max: int = fixed(
        86_400_000, "ms", "The longest idle timeout of a transaction."
    )
    # As many as may be open at once.
    transaction_outcomes_max: int = fixed(
        1_000,
        "outcomes",
        "Outcomes remembered of each table: so many applications keep their latest version, and so"
        " many of the latest commits can be repeated.",
    )
    # Small beside `commit_queue_bytes_max`, so that rows of other writers go in between.
    transaction_chunk_bytes: int = fixed(
        8 * _MIB, "bytes", "A commit is stored in pieces of this size; others write in between."
    )
    # All rows are planned in memory at once.
    transaction_rehearsed_rows_max: int = fixed(
        1_000_000,
        "rows",
        "Most rows of a transaction that updates named columns or aggregates: its commit is first"
        " tried in memory.",
    )
    # A lake that is back is tiered to within a minute.
    tiering_backoff_ms_max: int = fixed(
        60_000, "ms", "Longest pause of a table after repeatedly failed rounds."
    )
    # A look costs one stat; a revoked token is refused a second later.
    grants_check_interval_ms: int = fixed(
        1_000, "ms", "How often requests look whether the grants file has changed."
    )
    # Each table has several time series, and many time series burden Prometheus.
    metrics_tables_max: int = fixed(
        200, "tables", "Tables with their own metrics; the others are added up as '(other)'."
    )

    def __post_init__(self) -> None:
        for option in self.limits():
            if getattr(self, option.name) < 1:
                raise InvalidRequestError(f"{option.flag} must be at least 1 {option.unit}")
        for small, large in (
            ("batch_bytes_max", "body_bytes_max"),
            ("body_bytes_max", "bodies_bytes_max"),
            ("fetch_bytes_max", "answers_bytes_max"),
            ("body_bytes_max", "commit_queue_bytes_max"),
            ("tiering_backoff_ms_min", "tiering_backoff_ms_max"),
            ("transaction_timeout_ms", "transaction_timeout_ms_max"),
        ):
            if getattr(self, small) > getattr(self, large):
                raise InvalidRequestError(
                    f"{small} = {getattr(self, small)} must not exceed"
                    f" {large} = {getattr(self, large)}"
                )
        if self.batch_bytes_max > PAYLOAD_BYTES_LIMIT:
            raise InvalidRequestError(
                f"batch_bytes_max = {self.batch_bytes_max} must not exceed {PAYLOAD_BYTES_LIMIT},"
                " the most that a frame of the log holds"
            )
        if not 0 <= self.port <= 65_535:
            raise InvalidRequestError(f"port {self.port} is not in 0..65535 (0 picks a free one)")
        if self.catalog_access not in CATALOG_ACCESS:
            raise InvalidRequestError(
                f"catalog_access '{self.catalog_access}' must be {' or '.join(CATALOG_ACCESS)}"
            )
        self._check_readers()
        self._check_access()
        self._check_journal()
        self._check_kafka()

    def _check_readers(self) -> None:
        if not 0 <= self.readers <= _READERS_MAX:
            raise InvalidRequestError(f"--readers {self.readers} is not in 0..{_READERS_MAX}")
        if self.readers and self.tls_certificate_file is not None:
            raise InvalidRequestError(
                "--readers with --tls-cert: a connection with TLS cannot be handed to another"
                " process; put what speaks TLS before the service"
            )
        if self.readers and sys.platform != "linux":
            raise InvalidRequestError("--readers needs Linux")

    def _check_journal(self) -> None:
        if self.journal_url is None:
            for flag, is_given in (
                ("--standby", self.is_standby),
                ("--shard", self.shard != DEFAULT_SHARD),
                ("--advertise", self.advertised_endpoint is not None),
            ):
                if is_given:
                    raise InvalidRequestError(f"{flag} needs --journal")
            return
        ShardNames(self.shard)
        if self.journal_ack not in JOURNAL_ACKS:
            raise InvalidRequestError(
                f"--journal-ack '{self.journal_ack}' must be {' or '.join(JOURNAL_ACKS)}"
            )
        if self.lease_ms > LEASE_MS_MAX:
            raise InvalidRequestError(f"--lease-ms must be at most {LEASE_MS_MAX}, an hour")
        endpoint = self.advertised_endpoint
        if endpoint is not None and not OWNER_URL.fullmatch(endpoint):
            raise InvalidRequestError(
                f"--advertise '{endpoint[:200]}' must be a URL as http://host:port"
            )
        if self.shard != DEFAULT_SHARD and not self.has_own_catalog:
            raise InvalidRequestError(
                "shards have one lake catalog, and by default each would have its own: give"
                " --catalog-property and --warehouse, the same to all"
            )
        if not self.has_own_catalog and not self.journal_url.startswith("file://"):
            raise InvalidRequestError(
                "with --journal the lake must outlive this machine, too, and by default its catalog"
                " and warehouse are in the data directory: give --catalog-property type=... (or"
                " uri=...) of a catalog elsewhere, and --warehouse"
            )

    def _check_kafka(self) -> None:
        if self.kafka_port is None:
            if self.kafka_advertised is not None:
                raise InvalidRequestError("--kafka-advertise needs --kafka-port")
            return
        if not 0 <= self.kafka_port <= 65_535:
            raise InvalidRequestError(
                f"--kafka-port {self.kafka_port} is not in 0..65535 (0 picks a free one)"
            )
        if self.kafka_advertised is not None:
            kafka_address(self.kafka_advertised)
        elif self.host in _EVERY_ADDRESS:
            raise InvalidRequestError(
                f"--kafka-port with --host {self.host}: Kafka clients are told where to connect to,"
                " and this is no such address; give --kafka-advertise HOST:PORT"
            )

    @property
    def is_reached_by_tls(self) -> bool:
        """Whether callers reach this process by https."""
        advertised = self.advertised_endpoint or ""
        return self.tls_certificate_file is not None or advertised.startswith("https:")

    @property
    def has_own_catalog(self) -> bool:
        """Whether the configuration names a lake catalog outside the data directory."""
        return any(key in self.catalog_properties for key in _CATALOG_KIND_PROPERTIES)

    def _check_access(self) -> None:
        if self.token is None and self.grants_file is None and not is_loopback(self.host):
            raise InvalidRequestError(
                f"host '{self.host}' is reachable from other machines: give --token-file or"
                " --grants, or bind to 127.0.0.1"
            )
        for name in self.allowed_hosts:
            if name != ANY_HOST and not _HOST_NAME.fullmatch(name):
                raise InvalidRequestError(
                    f"--allowed-host '{name[:200]}' must be a host name without scheme and port"
                )
        if ANY_HOST in self.allowed_hosts and self.token is None and self.grants_file is None:
            raise InvalidRequestError(
                "--allowed-host '*' lets every web page use a service that asks for no token: give"
                " --token-file or --grants, or name the hosts"
            )
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise InvalidRequestError("TLS needs both --tls-cert and --tls-key")

    @classmethod
    def limits(cls) -> list[Limit]:
        """Return every limit in the order of the documentation: limits with an option first."""
        return [
            Limit(
                section=f.metadata["section"],
                name=f.name,
                default=int(f.default),  # type: ignore[arg-type]  # a limit's default is an int
                unit=f.metadata["unit"],
                help=f.metadata["help"],
            )
            for f in dataclasses.fields(cls)
            if "unit" in f.metadata
        ]

    @classmethod
    def settings(cls) -> list[Setting]:
        """Return the options that are no limits."""
        return settings_of(cls)

    @classmethod
    def options(cls) -> list[Limit]:
        """Return the limits with a command line option."""
        return [option for option in cls.limits() if option.section]

    @classmethod
    def from_texts(cls, limits: Mapping[str, str], **settings: Any) -> ServiceConfig:
        """Make a configuration from the texts of limits and the values of further fields.

        Raises `UnknownOptionError` with a suggestion, or `InvalidRequestError` with the option.
        """
        options = {option.name: option for option in cls.options()}
        for name in limits:
            if name not in options:
                raise UnknownOptionError(
                    f"the service has no setting '{name}'{suggestion(name, list(options))}"
                )
        parsed: dict[str, Any] = {name: options[name].parse(text) for name, text in limits.items()}
        return cls(**settings, **parsed)

    def lake_catalog(self) -> LakeCatalog:
        """Return the catalog of the lake tables; by default SQLite in `data_dir`."""
        properties = dict(self.catalog_properties)
        if not self.has_own_catalog:
            lake = self.data_dir.absolute() / "lake"
            properties = {
                "type": "sql",
                "uri": f"sqlite:///{lake / 'catalog.db'}",
                "warehouse": f"file://{lake / 'warehouse'}",
                **properties,
            }
        if self.warehouse is not None:
            properties["warehouse"] = self.warehouse
        if properties.get("uri", "").startswith("postgresql") and _IMPL not in properties:
            # A pooled connection lost while idle is detected before the next use.
            properties = {"type": "sql", "pool_pre_ping": "true", **properties}
        return self._catalog(properties)

    def _catalog(self, properties: Mapping[str, str]) -> LakeCatalog:
        timeout = {CATALOG_TIMEOUT_PROPERTY: str(self.catalog_timeout_ms)}
        timeout_properties = timeout if is_rest_catalog(properties) else {}
        return LakeCatalog(name=self.catalog_name, properties={**properties, **timeout_properties})

    def offered_catalog(self) -> LakeCatalog:
        """Return the catalog for tiering and readers: `lake_catalog`, or the service's catalog.

        The service's catalog has a `uri` relative to the endpoint; the client completes the `uri`.
        """
        catalog = self.lake_catalog()
        if self.catalog_access == "direct":
            return catalog
        files = {k: v for k, v in catalog.properties.items() if k.startswith(_FILE_PROPERTIES)}
        service_catalog = {"type": "rest", "uri": REST_CATALOG_PATH}
        return self._catalog({**files, **service_catalog})


def kafka_address(text: str) -> tuple[str, int]:
    """Read `host:port` or `[host]:port`, the address for Kafka clients."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535
    if not is_port or not _ADVERTISED_HOST.fullmatch(host):
        raise InvalidRequestError(
            f"--kafka-advertise '{text[:200]}' must be HOST:PORT, as in lake.example:9092"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; `localhost` is the only such name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
