"""Debezium in this process: its configuration, and the events from it.

Debezium's own position does not count. A run begins with a position in a temporary file, and
acknowledges a position only when our tables have everything below: the database drops no log still
in need. Debezium never retries by itself: the follower starts a new run.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from streamhouse.cdc_source._java import (
    TEXT_CONVERTER,
    implements,
    java_class,
    start_java,
)
from streamhouse.cdc_source._source_types import SourceColumn, WireType
from streamhouse.cdc_source._target_table import SourceTable, quoted
from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.core.threads import NamedThread

__all__ = ["DebeziumEngine", "EngineSettings", "EventKind", "SourceEvent"]

_CONNECTOR: Final = "io.debezium.connector.postgresql.PostgresConnector"
_STORE: Final = "org.apache.kafka.connect.storage.FileOffsetBackingStore"
_HEARTBEAT: Final = "__debezium-heartbeat"
_HEARTBEAT_MS: Final = 1_000
_TYPE: Final = "__debezium.source.column."
_BATCH_ROWS: Final = 8_192
_QUEUE_ROWS: Final = 16_384
_QUEUE_BYTES: Final = 256 << 20
_CLOSE_S: Final = 0.5


class EventKind(Enum):
    """What an event says."""

    CHANGE = "change"
    END = "end"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """A change of a row, the end of a transaction at `lsn`, or a sign of life.

    `columns` come with the first event of a table, and after a change of columns. `is_snapshot`:
    the snapshot still runs.
    """

    kind: EventKind
    is_snapshot: bool
    lsn: int = 0
    table: str = ""
    op: str = ""
    row: dict[str, Any] | None = None
    text: str = ""
    columns: tuple[SourceColumn, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What Debezium reads, from where on: `start_lsn` is None to begin with a snapshot.

    The publication must be there; the slot is made if it is not.
    """

    address: SourceAddress
    slot: str
    publication: str
    tables: Sequence[SourceTable]
    start_lsn: int | None
    placeholder: str

    def properties(self, offsets: Path) -> dict[str, str]:
        """Return Debezium's configuration."""
        address = self.address
        left_out = [
            re.escape(f"{table.full_name}.{name}")
            for table in self.tables
            for name in table.left_out
        ]
        return {
            "name": self.slot,
            "connector.class": _CONNECTOR,
            "offset.storage": _STORE,
            "offset.storage.file.filename": str(offsets),
            "offset.flush.interval.ms": "0",
            "errors.max.retries": "0",
            "slot.max.retries": "0",
            "topic.prefix": self.slot,
            "database.hostname": address.host,
            "database.port": str(address.port),
            "database.user": address.user,
            "database.password": address.password,
            "database.dbname": address.database,
            **{f"database.{name}": value for name, value in address.options.items()},
            "plugin.name": "pgoutput",
            "slot.name": self.slot,
            "publication.name": self.publication,
            "publication.autocreate.mode": "disabled",
            "table.include.list": ",".join(re.escape(table.full_name) for table in self.tables),
            **({"column.exclude.list": ",".join(left_out)} if left_out else {}),
            "snapshot.mode": "initial" if self.start_lsn is None else "no_data",
            "provide.transaction.metadata": "true",
            "tombstones.on.delete": "false",
            "skipped.operations": "none",
            "heartbeat.interval.ms": str(_HEARTBEAT_MS),
            "unavailable.value.placeholder": self.placeholder,
            "converters": "texts",
            "texts.type": TEXT_CONVERTER,
            "texts.placeholder": self.placeholder,
            **self._snapshot_selects(),
            "decimal.handling.mode": "string",
            "interval.handling.mode": "string",
            "hstore.handling.mode": "json",
            "time.precision.mode": "adaptive_time_microseconds",
            "include.unknown.datatypes": "true",
            "column.propagate.source.type": ".*",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "max.batch.size": str(_BATCH_ROWS),
            "max.queue.size": str(_QUEUE_ROWS),
            "max.queue.size.in.bytes": str(_QUEUE_BYTES),
            "poll.interval.ms": "50",
        }

    def _snapshot_selects(self) -> dict[str, str]:
        """Return queries for the snapshot of tables with dates.

        Java's old dates have no era and no infinity, and lack ten days in 1582: dates are read as
        numbers of days; a date outside the target's calendar becomes the next date before or after.
        A table name that is a plain name needs no quotes in a setting.
        """
        name = "snapshot.select.statement.overrides"
        selects = {
            f"{name}.{table.full_name}": _select_of(table)
            for table in self.tables
            if any(column.type_name == "date" for column in table.columns)
        }
        if not selects:
            return {}
        return {name: ",".join(key.removeprefix(f"{name}.") for key in selects), **selects}

    def write_offsets(self, offsets: Path) -> None:
        """Write the position for Debezium's start, in Debezium's own format.

        The position is `lsn` alone: the database then sends every transaction with an end after
        `lsn`, whole.
        """
        if self.start_lsn is None:
            return
        key = json.dumps([self.slot, {"server": self.slot}], separators=(",", ":"))
        value = json.dumps({"lsn": self.start_lsn, "ts_usec": 0}, separators=(",", ":"))
        stored = java_class("java.util.HashMap")()
        stored.put(_java_bytes(key), _java_bytes(value))
        stream = java_class("java.io.ObjectOutputStream")(
            java_class("java.io.FileOutputStream")(str(offsets))
        )
        stream.writeObject(stored)
        stream.close()


def _select_of(table: SourceTable) -> str:
    columns = []
    for column in table.columns:
        name = quoted(column.name)
        if column.type_name == "date":
            days = f"LEAST(GREATEST({name}, '0001-12-31 BC'::date), '10000-01-01'::date)"
            # LEAST and GREATEST pass over nulls.
            number = f"({days} - '1970-01-01'::date)::int8"
            name = f"CASE WHEN {name} IS NOT NULL THEN {number} END AS {name}"
        columns.append(name)
    return f"SELECT {', '.join(columns)} FROM {quoted(table.schema)}.{quoted(table.name)}"


def _java_bytes(text: str) -> Any:
    return java_class("java.lang.String")(text).getBytes("UTF-8")


# Takes events; returns the place of the last one that is durable with all before it, or None.
Handler = Callable[[list[SourceEvent]], int | None]


class DebeziumEngine:
    """One run of Debezium; ends by itself when something breaks."""

    def __init__(self, settings: EngineSettings, handler: Handler) -> None:
        start_java()
        self._settings = settings
        self._handler = handler
        self._failure: BaseException | None = None
        self._message = ""
        # Java's schema by topic and identity: an object lives as long as it is known here.
        self._schemas: dict[tuple[str, int], Any] = {}
        self._latest: dict[str, int] = {}
        self._identity = java_class("java.lang.System").identityHashCode

    def run(self, is_over: Callable[[], bool]) -> str:
        """Run until `is_over` or Debezium ends; return the reason for Debezium's own end, if any.

        Raises the handler's error.
        """
        with tempfile.TemporaryDirectory(prefix="streamhouse-cdc-") as folder:
            offsets = Path(folder, "offsets")
            self._settings.write_offsets(offsets)
            engine = self._build(self._settings.properties(offsets))
            thread = NamedThread("debezium", engine.run)
            thread.start()
            while thread.is_alive() and not is_over() and self._failure is None:
                thread.join(0.1)
            # An engine that is still starting refuses to be closed, and goes on.
            while thread.is_alive():
                self._close(engine)
                thread.join(_CLOSE_S)
        if self._failure is not None:
            raise self._failure
        return "" if is_over() else self._message or "it ended without saying why"

    def _close(self, engine: Any) -> None:
        try:
            engine.close()
        except java_class("java.lang.Exception"):
            # The engine is ending already, or still starting.
            pass

    def _build(self, given: dict[str, str]) -> Any:
        properties = java_class("java.util.Properties")()
        for name, value in given.items():
            properties.setProperty(name, value)
        consumer = implements(
            "io.debezium.engine.DebeziumEngine$ChangeConsumer",
            handleBatch=self._take,
            supportsTombstoneEvents=lambda: False,
        )
        callback = implements(
            "io.debezium.engine.DebeziumEngine$CompletionCallback", handle=self._ended
        )
        return (
            java_class("io.debezium.engine.DebeziumEngine")
            .create(java_class("io.debezium.engine.format.Json").class_)
            .using(properties)
            .using(callback)
            .notifying(consumer)
            .build()
        )

    def _ended(self, success: bool, message: Any, error: Any) -> None:
        if success:
            return
        texts = [str(message or "")]
        while error is not None:
            texts.append(str(error.getMessage() or ""))
            error = error.getCause()
        # The last cause says most; the first often only that something failed.
        self._message = next((text for text in reversed(texts) if text), "").replace("\n", " ")

    def _take(self, records: Any, committer: Any) -> None:
        try:
            batch = list(records)
            events = [self._event(record) for record in batch]
            handled = self._handler(events)
            if handled is not None:
                committer.markProcessed(batch[handled])
            committer.markBatchFinished()
        except java_class("java.lang.Throwable"):
            raise
        # Java cannot handle the error: `run` raises it in its own thread.
        except BaseException as error:  # noqa: BLE001
            self._failure = error
            raise java_class("java.lang.InterruptedException")("stopped") from None

    def _event(self, record: Any) -> SourceEvent:
        source = record.sourceRecord()
        topic = str(record.destination())
        offset = source.sourceOffset()
        is_snapshot = offset.get("snapshot") is not None
        if topic.startswith(_HEARTBEAT):
            return SourceEvent(EventKind.IDLE, is_snapshot)
        text = str(record.value())
        value = json.loads(text)
        if "op" not in value:
            if value.get("status") != "END":
                return SourceEvent(EventKind.IDLE, is_snapshot)
            return SourceEvent(EventKind.END, is_snapshot, lsn=int(offset.get("lsn_commit")))
        place = value["source"]
        op = str(value["op"])
        table = f"{place['schema']}.{place['table']}"
        columns = None if op == "t" else self._new_columns(topic, source.valueSchema())
        row = value["before"] if op == "d" else value["after"]
        return SourceEvent(
            EventKind.CHANGE,
            is_snapshot,
            table=table,
            op=op,
            row=row,
            text=text,
            columns=columns,
        )

    def _new_columns(self, topic: str, schema: Any) -> tuple[SourceColumn, ...] | None:
        """Return the columns of a row's schema if changed since the table's last event."""
        identity = int(self._identity(schema))
        if self._latest.get(topic) == identity:
            return None
        self._latest[topic] = identity
        self._schemas[topic, identity] = schema
        fields = schema.field("after").schema().fields()
        return tuple(_column(field) for field in fields)


def _column(field: Any) -> SourceColumn:
    schema = field.schema()
    parameters = schema.parameters() or {}
    values = {name: parameters.get(_TYPE + name) for name in ("type", "length", "scale")}
    length, scale = (
        None if values[name] is None else int(str(values[name])) for name in ("length", "scale")
    )
    type_name = str(values["type"] or "").lower()
    wire = replace(_wire(schema), type_name=type_name, scale=scale or 0)
    return SourceColumn(
        str(field.name()),
        type_name,
        length,
        scale,
        wire,
        is_enum=wire.name.endswith(".Enum"),
    )


def _wire(schema: Any) -> WireType:
    kind = str(schema.type().toString()).upper()
    return WireType(kind, str(schema.name() or ""))
