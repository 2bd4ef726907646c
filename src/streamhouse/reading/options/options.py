"""Every option of the format `streamhouse`: key, default, unit and meaning in one place.

Spark hands options over as strings with keys in lower case. An unknown key is an error with a
suggestion. An option without effect in its use is an error, too; keys added by Spark pass.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, TypeVar

from streamhouse.client import DEFAULT_ENDPOINT
from streamhouse.core.errors import (
    InvalidRequestError,
    UnknownOptionError,
    suggestion,
)
from streamhouse.core.model.offsets import table_of_offsets
from streamhouse.core.model.values.positions import (
    StartingPosition,
    parse_ending_offsets,
    parse_starting_offsets,
    parse_timestamp_us,
)
from streamhouse.core.model.values.units import (
    parse_boolean,
    parse_bytes,
    parse_whole_number,
)
from streamhouse.core.model.values.zone import parse_zone
from streamhouse.reading.options._change_options import ChangeOptions, change_options, time_bounds
from streamhouse.reading.options.connection import (
    ConnectionOptions,
    TableName,
    connection_options,
)
from streamhouse.reading.options.name_lists import (
    parse_consumer,
    parse_long_poll_ms,
    parse_names,
    parse_snapshot_id,
)

__all__ = [
    "OPTIONS",
    "SKIP_OPTIONS",
    "Option",
    "ReadOptions",
    "ShapeOptions",
    "read_options",
    "shape_options",
]

BATCH: Final = "batch read"
STREAM: Final = "stream read"
WRITE: Final = "write"
_READS: Final = (BATCH, STREAM)
_OF_CONNECTION: Final = ("table", "path", "paths", "endpoint", "token", "tls.ca", "read.from")
_ARGUMENTS: Final = {
    "read": ("columns", "where"),
    "scan": ("columns", "where", "limit"),
    "count": ("where",),
    "query": ("args", "memory_limit"),
}
"""Call of the Python client -> its arguments beside the options."""

TRANSACTION_TIMEOUT: Final = "6h"
ALL_USES: Final = (BATCH, STREAM, WRITE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option as users see it; an empty default means unset."""

    key: str
    default: str
    uses: tuple[str, ...]
    meaning: str


OPTIONS: Final = (
    Option("endpoint", "", ALL_USES, "URL of the service, or"
           " [several](configuration.md#several-endpoints) as `http://a:8765,http://b:8765`; else"
           f" `STREAMHOUSE_ENDPOINT`, else `{DEFAULT_ENDPOINT}`."),
    Option("token", "", ALL_USES, "Bearer token; else `STREAMHOUSE_TOKEN`."),
    Option("tls.ca", "", ALL_USES, "File of CA certificates that vouch for an `https` endpoint, on"
           " every machine; else `STREAMHOUSE_CA_FILE`, else those the machine trusts."),
    Option("read.from", "owner", _READS, "`owner`, or `any`: standbys among the endpoints"
           " [answer fetches of the log](journal.md#fetches-at-a-standby) as well. Plans and"
           " positions always come from the owner."),
    Option("table", "", ALL_USES, "The table, where there is no path to give: `database.table`."),
    Option("columns", "", _READS, "Only these columns, as `a,b`: nothing else is read from Parquet"
           " or sent by the service. Backticks around a name that holds a comma; one in it twice."),
    Option("where", "", _READS, "Only rows for which this SQL predicate is true. Exact; skips lake"
           " partitions, files and row groups."),
    Option("includeMetadata", "false", _READS, "Add the columns `__bucket`, `__offset` and"
           " `__timestamp`."),
    Option("startingOffsets", "full", _READS, "Where to start: `full`, `earliest`, `latest`"
           " (streams), a time like `startingTimestamp`, or JSON like"
           ' `{"0": 12, "1": "earliest"}`, or with its table `{"table_id": 7, "offsets":'
           ' {"0": 12}}`, which is refused if that was dropped. A stream uses it only without a'
           " checkpoint."),
    Option("endingOffsets", "latest", (BATCH,), "Where to end (exclusive): `latest`, or JSON as"
           ' `startingOffsets` has it, like `{"0": 99, "1": "latest"}`.'),
    Option("startingTimestamp", "", _READS, "Only rows written at or after this time: ISO-8601, or"
           " milliseconds or microseconds since 1970."),
    Option("endingTimestamp", "", (BATCH,), "Only rows written before this time, written like"
           " `startingTimestamp`."),
    Option("asOfTimestamp", "", (BATCH,), "The table as it was at this time: rows written at or"
           " before it. Written like `startingTimestamp`."),
    Option("asOfSnapshot", "", (BATCH,), "The rows of this lake snapshot (see"
           " `table$snapshots`), without the log."),
    Option("timeZone", "", _READS, "Zone of times without one in `where` and in the options that"
           " take a time, like `Europe/Berlin` or `+01:00`; default: the session's"
           " `spark.sql.session.timeZone`, and `UTC` without Spark."),
    Option("readChangeFeed", "", (STREAM,), "Rows are changes, each with its"
           " `__change_type`: so unless told otherwise where the table has a primary key. `false`:"
           " only new versions of rows, without that column."),
    Option("changeFormat", "streamhouse", _READS, "`spark`: changes have Spark's columns"
           " `_change_type`, `_commit_version` and `_commit_timestamp`, as"
           " [`table$changes`](spark_changes.md#changes-in-sparks-form) always has."),
    Option("startingVersion", "", _READS, "Changes in Spark's form: the first `_commit_version`."),
    Option("endingVersion", "", (BATCH,), "Changes in Spark's form: the last `_commit_version`."),
    Option("startingBoundInclusive", "true", _READS, "Changes in Spark's form: whether changes of"
           " the starting version or time itself are read."),
    Option("endingBoundInclusive", "true", (BATCH,), "Changes in Spark's form: whether changes of"
           " the ending version or time itself are read."),
    Option("deduplicationMode", "none", _READS, "Changes in Spark's form: `netChanges` reads one"
           " change for each key, the sum of its changes; of a stream, in each micro-batch. `none`"
           " and `dropCarryovers` are the same, as we have no carry-overs."),
    Option("computeUpdates", "true", _READS, "Changes in Spark's form: `false` shows an update as"
           " `delete` and `insert`."),
    Option("failOnDataLoss", "true", _READS, "Fail when wanted rows are gone from log and lake;"
           " `false` skips them with a warning."),
    Option("minPartitions", "", _READS, "Split large reads into at least about this many tasks;"
           " default: twice the driver's cores."),
    Option("maxSplitBytes", "128MiB", _READS, "Split files over this size at row groups."),
    Option("maxOffsetsPerTrigger", "10000000", (STREAM,), "At most this many rows per micro-batch,"
           " spread fairly over the buckets."),
    Option("longPollMs", "300", (STREAM,), "How long a trigger waits for new rows at the service,"
           " in milliseconds; other sources of the same query wait too. 0 to 10000."),
    Option("consumer", "", (STREAM,), "The name under which the stream tells the service how far it"
           " has read (`streamhouse consumers`); default: one that its checkpoint keeps."),
    Option("streaming-skip-overwrite-snapshots", "false", (STREAM,), "Only `$iceberg`: pass over"
           " snapshots that overwrite rows, which are an error else. The name is Iceberg's."),
    Option("streaming-skip-delete-snapshots", "false", (STREAM,), "Only `$iceberg`: pass over"
           " snapshots that delete rows, which are an error else. The name is Iceberg's."),
    Option("write.mode", "", (WRITE,), "What rows do: `append` (log tables, their default),"
           " `upsert` (primary key tables, their default), `delete` the rows with these keys,"
           " `partial`: update only the columns of the rows."),
    Option("write.transactional", "true", (WRITE,), "Write all rows of a job, or of a micro-batch,"
           " or none, once; `false` sends them straight to the table: at-least-once."),
    Option("app.id", "", (WRITE,), "Who writes, for writes that must not happen twice; default for"
           " streams: the query's id, which its checkpoint keeps."),
    Option("app.version", "", (WRITE,), "Number of this write of `app.id`: the table skips it"
           " unless it is greater than the last one committed. Streams number their batches."),
    Option("schema.id", "", (WRITE,), "Version of the table's schema that the rows' columns"
           " are named by; default: the current one. A stream or a numbered write must say it where"
           " a column has the name that [another column had](schema_evolution.md#who-sees-what)."),
    Option("transaction.timeout", TRANSACTION_TIMEOUT, (WRITE,), "After this long without a row or"
           " a commit the service drops a transaction; at most its `transaction_timeout_ms_max`."),
    Option("sequence.column", "", (WRITE,), "Of several rows with one key the one with the greater"
           " value here wins."),
    Option("on.error", "refuse", (WRITE,), "`reject`: rows that do not fit go to"
           " [`table$rejected`](spark.md#keep-rows-that-do-not-fit) with their reason, in the same"
           " transaction, and the others are written."),
    Option("mergeSchema", "false", (WRITE,), "`true` adds the rows' new columns, and fields"
           " of structs, to the table, widens types, also inside structs, arrays and maps, drops"
           " NOT NULL where the rows' column may be null, and writes null for columns and"
           " fields that it lacks; with `write.mode` = `partial` columns that it lacks stay."),
    Option("keepNullability", "false", (WRITE,), "If this write creates the table: `true` makes the"
           " columns NOT NULL that Spark knows to have no null, as literals and `range`; else only"
           " the primary key is."),
    Option("bucket.num", "1", (WRITE,), "Buckets of the table, if this write creates it."),
    Option("bucket.key", "", (WRITE,), "Columns `a,b` whose equal rows share a bucket, if this"
           " write creates the table."),
    Option("primary.key", "", (WRITE,), "Primary key columns `a,b`, if this write creates the"
           " table."),
    Option("partitioned.by", "", (WRITE,), "Lake partitioning like `region, day(ts)`, if this write"
           " creates the table."),
)  # fmt: skip
"""All options; table properties are accepted by writes beside these."""

_BY_KEY: Final = {option.key.lower(): option for option in OPTIONS}
# Those of a table, and those of its columns under the aggregation engine.
PROPERTY_PREFIXES: Final = ("table.", "fields.")

SKIP_OPTIONS: Final = ("streaming-skip-overwrite-snapshots", "streaming-skip-delete-snapshots")
_SOURCE_OPTIONS: Final = (
    "columns",
    "where",
    "startingOffsets",
    "asOfSnapshot",
    "timeZone",
    "minPartitions",
    "maxSplitBytes",
    "maxOffsetsPerTrigger",
    "longPollMs",
    *SKIP_OPTIONS,
)
"""Those of a read of any Iceberg table (`db.table$iceberg`)."""

FORMAT: Final = "streamhouse"

PROVIDER_PREFIX: Final = "streamhouse_"
"""How the formats of attached names begin: each has one of its own."""

STREAM_MARK: Final = "__streamhouse_stream"
"""What `readStream` adds, so that the source can give a stream its columns (_spark_readers.py)."""

STEPS_MARK: Final = "__streamhouse_steps"
"""What `readStream` adds for a Spark before 4.2: the name of the load (_stream_steps.py)."""

PLANNED_MARK: Final = "__streamhouse_planned"
"""What `read` adds, so that each statement plans the read afresh (_spark_readers.py)."""

NUMBERS_MARK: Final = "__streamhouse_numbers"
"""What `read` adds where it can show numbers as decimals (_decimal_numbers.py)."""

PLANNED_COLUMN: Final = "__streamhouse_planned"
"""The column that such a read has beside the table's; it is true in every row."""

ZONE_MARK: Final = "__streamhouse_time_zone"
"""What `read`, `readStream` and `attach` add: the session's zone, which Spark tells no source."""

QUERY_MARK: Final = "__streamhouse_query"
RUN_MARK: Final = "__streamhouse_run"
"""Options that say for which stream, and in which run of it, foreachBatch writes; set by us."""

ROW_COUNT_MARK: Final = "__streamhouse_row_count"
"""What a query adds that needs only the number of the rows."""

ROW_COUNT: Final = "row_count"
"""The one column of such a read; the number of rows is its sum."""

# What Spark adds to the options of sources by itself: paths, catalog tables, streams, INSERT.
_SPARK_KEYS: Final = frozenset(
    {
        "path",
        "paths",
        "checkpointlocation",
        "serialization.format",
        "owner",
        "location",
        "provider",
        "external",
        "is_managed_location",
        "queryname",
        "__sourcename",
        STREAM_MARK,
        STEPS_MARK,
        PLANNED_MARK,
        NUMBERS_MARK,
        ZONE_MARK,
        QUERY_MARK,
        RUN_MARK,
        ROW_COUNT_MARK,
    }
)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a batch or stream read wants; times in microseconds since the epoch."""

    connection: ConnectionOptions
    columns: tuple[str, ...] | None
    where: str | None
    time_zone: str
    include_metadata: bool
    starting: StartingPosition
    ending: Mapping[int, int] | None
    from_timestamp_us: int | None
    to_timestamp_us: int | None
    as_of_timestamp_us: int | None
    as_of_snapshot: int | None
    read_change_feed: bool | None
    fail_on_data_loss: bool
    min_partitions: int | None
    max_split_bytes: int
    max_offsets_per_trigger: int
    long_poll_ms: int
    skipped_snapshots: frozenset[str] = frozenset()
    change_options: ChangeOptions | None = None
    consumer: str | None = None
    is_row_count: bool = False


def check_keys(options: Mapping[str, str], *, uses: Sequence[str]) -> dict[str, str]:
    """Return the options with keys in lower case; raises for one that none of `uses` has.

    An option without a value is refused: an unset variable must not read or write something else.
    """
    by_key = {str(key).lower(): value for key, value in options.items()}
    for key, value in by_key.items():
        option = _BY_KEY.get(key)
        if option is not None and not str(value or "").strip():
            raise InvalidRequestError(
                f"option '{option.key}' is empty; give it a value, or leave it out"
            )
        if option is not None and not _shared(option, uses):
            raise InvalidRequestError(
                f"option '{option.key}' has no meaning for a {uses[0]} (only for:"
                f" {', '.join(option.uses)}); remove it"
            )
        if option is None and key not in _SPARK_KEYS and not key.startswith(PROPERTY_PREFIXES):
            keys = [option.key for option in OPTIONS if _shared(option, uses)]
            raise UnknownOptionError(
                f"unknown option '{key}'{suggestion(key, keys)} (known: {', '.join(keys)})"
            )
        if key.startswith(PROPERTY_PREFIXES) and WRITE not in uses:
            raise InvalidRequestError(
                f"option '{key}' has no meaning for a {uses[0]}: table properties are set when a"
                " write creates the table, or by the client's alter_properties"
            )
    return by_key


def applicable(options: Mapping[str, str], *, uses: Sequence[str]) -> dict[str, str]:
    """Return only the options with a meaning for one of `uses`."""
    return {
        key: value
        for key, value in options.items()
        if (
            _shared(option, uses)
            if (option := _BY_KEY.get(key.lower())) is not None
            else WRITE in uses or not key.lower().startswith(PROPERTY_PREFIXES)
        )
    }


def _shared(option: Option, uses: Sequence[str]) -> bool:
    return not set(uses).isdisjoint(option.uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """The options that decide a read's columns, before Spark chooses batch or stream."""

    connection: ConnectionOptions
    columns: tuple[str, ...] | None
    include_metadata: bool
    read_change_feed: bool | None
    is_spark_form: bool = False
    is_stream: bool = False
    is_planned_afresh: bool = False
    has_numbers: bool = False
    is_row_count: bool = False


def shape_options(options: Mapping[str, str]) -> ShapeOptions:
    """Read the options that decide a read's columns; refuses keys that no read has."""
    by_key = check_keys(options, uses=(BATCH, STREAM))
    connection = connection_options(options)
    return ShapeOptions(
        connection=connection,
        columns=optional(by_key, "columns", parse_names),
        include_metadata=_value(by_key, "includeMetadata", parse_boolean),
        read_change_feed=optional(by_key, "readChangeFeed", parse_boolean),
        is_spark_form=change_options(by_key, connection.name) is not None,
        is_stream=STREAM_MARK in by_key,
        is_planned_afresh=PLANNED_MARK in by_key,
        has_numbers=NUMBERS_MARK in by_key,
        is_row_count=ROW_COUNT_MARK in by_key,
    )


def read_options(options: Mapping[str, str], *, use: str) -> ReadOptions:
    """Read and check the options of a read; `use` is `BATCH` or `STREAM`."""
    by_key = check_keys(options, uses=(use,))
    connection = connection_options(options)
    _check_part(by_key, connection.name)
    # Looked up only where a time needs it: a machine without a zone database reads the rest.
    session_zone = (by_key.get(ZONE_MARK) or "UTC").strip()
    zone = (by_key.get("timezone") or session_zone).strip()
    if zone == session_zone.partition("|")[0]:
        # The driver has asked Java about it.
        zone = session_zone
    elif "timezone" in by_key:
        parse_zone(zone, name="option 'timeZone'")
    parse_time = functools.partial(parse_timestamp_us, zone=zone)
    parse_start = functools.partial(parse_starting_offsets, zone=zone)
    starting = _value(by_key, "startingOffsets", parse_start)
    from_us = optional(by_key, "startingTimestamp", parse_time)
    if starting.kind == "timestamp":
        if from_us is not None:
            raise InvalidRequestError(
                "options 'startingOffsets' and 'startingTimestamp' both give a time; use one"
            )
        from_us = starting.timestamp_us
    if starting.kind == "latest" and use == BATCH:
        raise InvalidRequestError(
            "option 'startingOffsets' = 'latest' would read nothing; it is for streams"
        )
    _check_conflicts(by_key, is_bounded=from_us is not None or starting.kind != "full")
    to_us = optional(by_key, "endingTimestamp", parse_time)
    if (as_of_us := optional(by_key, "asOfTimestamp", parse_time)) is not None:
        to_us = as_of_us + 1
    changes = change_options(by_key, connection.name)
    if changes is not None:
        from_us, to_us = time_bounds(by_key, from_us, to_us)
    return ReadOptions(
        connection=connection,
        columns=optional(by_key, "columns", parse_names),
        where=(by_key.get("where") or "").strip() or None,
        time_zone=zone,
        include_metadata=_value(by_key, "includeMetadata", parse_boolean),
        starting=starting,
        ending=optional(by_key, "endingOffsets", parse_ending_offsets),
        from_timestamp_us=from_us,
        to_timestamp_us=to_us,
        as_of_timestamp_us=as_of_us,
        as_of_snapshot=optional(by_key, "asOfSnapshot", parse_snapshot_id),
        read_change_feed=optional(by_key, "readChangeFeed", parse_boolean),
        fail_on_data_loss=_value(by_key, "failOnDataLoss", parse_boolean),
        min_partitions=optional(by_key, "minPartitions", parse_whole_number),
        max_split_bytes=_value(by_key, "maxSplitBytes", parse_bytes),
        max_offsets_per_trigger=_value(by_key, "maxOffsetsPerTrigger", parse_whole_number),
        long_poll_ms=_value(by_key, "longPollMs", parse_long_poll_ms),
        consumer=optional(by_key, "consumer", parse_consumer),
        skipped_snapshots=frozenset(
            key for key in SKIP_OPTIONS if _value(by_key, key, parse_boolean)
        ),
        change_options=changes,
        is_row_count=ROW_COUNT_MARK in by_key,
    )


def _check_part(by_key: Mapping[str, str], name: TableName) -> None:
    """Raise for options without a meaning for this part of a table."""
    if name.is_iceberg:
        part_keys = [key for key in by_key if key in _BY_KEY and _BY_KEY[key].uses != ALL_USES]
        _check_source_options(by_key, [_BY_KEY[key].key for key in part_keys], name)
        return
    for key in SKIP_OPTIONS:
        if key in by_key:
            raise InvalidRequestError(
                f"option '{key}' is for reads of '{name.path}$iceberg'; remove it"
            )
    if not name.is_metadata:
        return
    for key in by_key:
        option = _BY_KEY.get(key)
        if option is not None and option.uses != ALL_USES and option.key != "columns":
            raise InvalidRequestError(
                f"option '{option.key}' has no meaning for '{name}', which describes the table;"
                " filter the rows"
            )


def _check_source_options(
    by_key: Mapping[str, str], read_options: Iterable[str], name: TableName
) -> None:
    """Raise `InvalidRequestError` for `given` options about logs or our own lake tables."""
    for key in read_options:
        if key not in _SOURCE_OPTIONS:
            raise InvalidRequestError(
                f"option '{key}' has no meaning for '{name}', which may be anybody's Iceberg"
                f" table; its options: {', '.join(_SOURCE_OPTIONS)}"
            )
    if by_key.get("startingoffsets", "full").strip().lower() not in ("full", "latest"):
        raise InvalidRequestError(
            f"option 'startingOffsets' of '{name}' is 'full' (the current snapshot's rows, then"
            f" appends) or 'latest' (only what is appended from now on), not"
            f" '{by_key['startingoffsets']}'"
        )


def _check_conflicts(by_key: Mapping[str, str], *, is_bounded: bool) -> None:
    if by_key.get("asofsnapshot"):
        conflicts = ("asOfTimestamp", "endingOffsets", "endingTimestamp")
        bad = [key for key in conflicts if by_key.get(key.lower())]
        if bad or is_bounded:
            raise InvalidRequestError(
                "option 'asOfSnapshot' reads a whole lake snapshot and cannot be combined with"
                f" '{bad[0] if bad else 'startingOffsets'}'"
            )
    if by_key.get("asoftimestamp") and by_key.get("endingtimestamp"):
        raise InvalidRequestError(
            "options 'asOfTimestamp' (inclusive) and 'endingTimestamp' (exclusive) both end the"
            " read; use one"
        )


def _value(by_key: Mapping[str, str], key: str, parse: Callable[..., _T]) -> _T:
    text = by_key.get(key.lower()) or _BY_KEY[key.lower()].default
    return parse(text, name=f"option '{key}'")


def optional(by_key: Mapping[str, str], key: str, parse: Callable[..., _T]) -> _T | None:
    """Return what `parse` makes of an option; None without it."""
    text = by_key.get(key.lower())
    return None if text is None or not text.strip() else parse(text, name=f"option '{key}'")


def as_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return keyword arguments as Spark would hand them over: as texts.

    Booleans are in lower case. Dicts, such as positions (bucket -> offset), are JSON, with the
    table of the offsets if known.
    """
    return {key: _as_text(key, value) for key, value in options.items()}


def call_options(options: Mapping[str, Any], *, call: str) -> dict[str, str]:
    """Do the work of `as_options` for a client's call, which has a service and a table already.

    Raises `InvalidRequestError` for an option that names another service or table, and
    `UnknownOptionError` with the call's arguments for one that does not exist.
    """
    options_of_calls = [
        option.key
        for option in OPTIONS
        if BATCH in option.uses and option.key not in (*_OF_CONNECTION, "columns", "where")
    ]
    known = [*_ARGUMENTS[call], *options_of_calls]
    for key in options:
        if key.lower() in _OF_CONNECTION:
            raise InvalidRequestError(
                f"'{key}' is no option of a read: the client and the path say it; remove it"
            )
        if key.lower() not in _BY_KEY and not key.lower().startswith(PROPERTY_PREFIXES):
            others = [
                f"client.{name}" for name, arguments in _ARGUMENTS.items() if key in arguments
            ]
            hint = f"; {' and '.join(others)} has it" if others else suggestion(key, known)
            raise UnknownOptionError(
                f"{call} has no argument '{key}'{hint} (known: {', '.join(known)})"
            )
    return as_options(options)


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Mapping):
        # An option without a value is refused as an empty one.
        return "" if value is None else str(value)
    json_value, table_id = _json_value(name, value), table_of_offsets(value.values(), what=name)
    return json.dumps(
        json_value if table_id is None else {"table_id": table_id, "offsets": json_value}
    )


def _json_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        members = {str(key): _json_value(name, member) for key, member in value.items()}
        if len(members) < len(value):
            raise InvalidRequestError(f"{name} names something twice: {value!r:.200}")
        return members
    # Offsets may be numpy's, whose text is that of the number.
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_number else str(value)
