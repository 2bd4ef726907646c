"""Registers and finds the schemas of tables, with the permissions of the tables."""

from __future__ import annotations

import functools

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    TableExistsError,
)
from streamhouse.core.model.records.record_format import KeyFormat, ValueFormat
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.rows.companion import is_rejecting
from streamhouse.storage_service.engine.column_replacement import (
    is_untouched,
    may_have_rows,
    with_other_columns,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.avro_library import check_known
from streamhouse.storage_service.kafka.avro_schema import AvroSchema, avro_schema, cached_schema
from streamhouse.storage_service.kafka.registry.fitting import (
    TableChange,
    change_for,
    check_covers_rows,
    check_covers_schema,
    new_table,
    reading_schema,
    replacement_table,
)
from streamhouse.storage_service.kafka.registry.schema_set import (
    RegisteredSchema,
    SchemaSet,
    compact,
    table_id_of,
)
from streamhouse.storage_service.kafka.registry.subjects import Part, Subject
from streamhouse.storage_service.kafka.topics import is_same_topic, topic_name_of
from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.service import Service

__all__ = [
    "check_fits",
    "keep_reading_schemas",
    "register",
    "subject_table",
    "table_with_schema",
]


def subject_table(service: Service, exchange: Exchange, subject: Subject) -> OpenTable:
    """Return the table of a subject to a caller with the right to read.

    Raises `ForbiddenError`, whether the table exists or not, and `TableNotFoundError`.
    """
    service.access.require(exchange, Level.READ, str(subject.path))
    table = service.readable(str(subject.path))
    _check_topic(subject, table)
    return table


def table_with_schema(
    service: Service, exchange: Exchange, schema_id: int
) -> tuple[OpenTable, RegisteredSchema] | None:
    """Return the table and schema of a schema id; None if the caller may not read the table."""
    table_id = table_id_of(schema_id)
    for table in service.manager.open_tables():
        if table.info.table_id != table_id:
            continue
        if not exchange.caller.may(Level.READ, str(table.path)):
            return None
        service.manager.check_readable(table)
        try:
            return table, schemas_of(table).current().with_id(schema_id)
        except NotFoundError:
            return None
    return None


async def register(
    service: Service, exchange: Exchange, subject: Subject, text: str
) -> tuple[SchemaSet, RegisteredSchema]:
    """Return the table's schemas and a registered schema, durable, for which the table has columns.

    A subject without a table gets a table with the schema's columns. A table without any rows, made
    by a client's topic request, is replaced in the same way. Further tables change as far as
    schemas change. A caller with only the right to write may register a schema that needs no
    change.

    Raises `ForbiddenError`, `SchemaMismatchError` if the table cannot have the schema's columns,
    and as the creation and the change of a table.
    """
    service.access.require(exchange, Level.WRITE, str(subject.path))
    text = await service.run_blocking(compact, text)
    registered = await _registered_already(service, subject, text)
    if registered is not None:
        return registered
    schema = await service.run_blocking(_readable, text)
    table = await _existing_or_new_table(service, exchange, subject, schema)
    _check_topic(subject, table)
    schemas = schemas_of(table)
    async with schemas.changing:
        # Added before the table changes: a schema that cannot be registered changes nothing.
        schema_set, registered_schema = await service.run_blocking(
            _added, schemas.current(), subject.part, text
        )
        await _replace_columns(service, exchange, table, subject, schema)
        change = await _change(service, table, subject, schema, text)
        if change:
            service.access.require(exchange, Level.ADMIN, str(subject.path))
            await _apply(service, table, change)
        info = await _keep_with_reading_schemas(table, schema_set)
        if await service.run_blocking(_is_unchanging, info, subject, schema):
            schemas.set_fitting(info, registered_schema.number)
        return schemas.current(), registered_schema


async def check_fits(service: Service, exchange: Exchange, subject: Subject, text: str) -> None:
    """Raise as `register` would for an unfit schema; nothing is changed."""
    table = subject_table(service, exchange, subject)
    text = await service.run_blocking(compact, text)
    schema = await service.run_blocking(_readable, text)
    if await _replacing(service, table, subject, schema) is None:
        await _change(service, table, subject, schema, text)


async def keep_reading_schemas(table: OpenTable) -> None:
    """Register schemas with all columns of an Avro table, unless the newest ones are complete.

    Afterwards the table can be read, even if its columns changed otherwise or no schema was ever
    registered.
    """
    schemas = schemas_of(table)
    if schemas.do_fit(table.info) or not _avro_parts(table.info):
        return
    async with schemas.changing:
        if not schemas.do_fit(table.info):
            await _keep_with_reading_schemas(table, schemas.current())


async def _keep_with_reading_schemas(table: OpenTable, schema_set: SchemaSet) -> TableInfo:
    """Store schemas for all rows of a table; return the covered version of the table.

    The caller holds `changing`: the schemas stay, although the table may change meanwhile.
    """
    schemas = schemas_of(table)
    while True:
        info = table.info
        complete_set = await schemas.run(_with_reading_schemas, info, schema_set)
        complete_set = complete_set.with_table_schema(
            info.schema_id, since=len(schemas.current().schemas)
        )
        if table.info is info:
            break
    await schemas.keep(complete_set)
    schemas.set_fitting(info)
    return info


# -- slow with wide schemas: functions for threads ------------------------------------


def _readable(text: str) -> AvroSchema:
    """Return a schema usable for reading records; raises `InvalidRequestError` otherwise."""
    schema = avro_schema(text)
    check_known(schema)
    return schema


def _added(schema_set: SchemaSet, part: Part, text: str) -> tuple[SchemaSet, RegisteredSchema]:
    extended_set = schema_set.with_schema(part, text)
    schema = extended_set.find(part, text)
    assert schema is not None, "just added"
    return extended_set, schema


def _checked_change(
    info: TableInfo,
    subject: Subject,
    schema: AvroSchema,
    text: str,
    schema_set: SchemaSet,
    has_rows: bool,
) -> TableChange:
    """Return the change by `change_for`.

    Raises unless a new schema has all fields of the newest schema, or of the rows.
    """
    change = change_for(info, subject, schema)
    part_schemas = schema_set.of(subject.part)
    if not part_schemas and has_rows:
        check_covers_rows(subject, schema, info)
    if part_schemas and schema_set.find(subject.part, text) is None:
        check_covers_schema(subject, schema, cached_schema(part_schemas[-1].text))
    return change


def _is_unchanging(info: TableInfo, subject: Subject, schema: AvroSchema) -> bool:
    try:
        return not change_for(info, subject, schema)
    except InvalidRequestError:
        # The table has just been changed otherwise; the next registration reports this.
        return False


def _with_reading_schemas(info: TableInfo, schema_set: SchemaSet) -> SchemaSet:
    for part in _avro_parts(info):
        part_schemas = schema_set.of(part)
        missing = reading_schema(
            info,
            part,
            part_schemas[-1].text if part_schemas else None,
            bytes_max=schema_set.room_bytes,
        )
        if missing is not None:
            schema_set = schema_set.with_newest(part, missing)
    return schema_set


def _avro_parts(info: TableInfo) -> list[Part]:
    form = info.descriptor.record_format()
    parts = [Part.VALUE] if form.value is ValueFormat.AVRO else []
    return [*parts, Part.KEY] if form.key is KeyFormat.AVRO and form.key_columns else parts


# -- the table -----------------------------------------------------------------------------------


async def _registered_already(
    service: Service, subject: Subject, text: str
) -> tuple[SchemaSet, RegisteredSchema] | None:
    """Return a registered schema, if the table is known to need no change for the schema.

    Serializers register their schemas at each start.
    """
    try:
        table = service.table(str(subject.path))
    except NotFoundError:
        return None
    _check_topic(subject, table)
    schemas = schemas_of(table)
    schema_set = schemas.current()
    schema = await service.run_blocking(schema_set.find, subject.part, text)
    if schema is None or not schemas.do_fit(table.info, schema.number):
        return None
    return schema_set, schema


async def _change(
    service: Service, table: OpenTable, subject: Subject, schema: AvroSchema, text: str
) -> TableChange:
    """Return the change that the present table needs; raises as `_checked_change`."""
    while True:
        info, schema_set = table.info, schemas_of(table).current()
        has_rows = may_have_rows(service.manager, table)
        change = await service.run_blocking(
            _checked_change, info, subject, schema, text, schema_set, has_rows
        )
        if table.info is info:
            return change


async def _existing_or_new_table(
    service: Service, exchange: Exchange, subject: Subject, schema: AvroSchema
) -> OpenTable:
    try:
        return service.table(str(subject.path))
    except NotFoundError:
        # The database may exist on another shard only.
        service.access.require(exchange, Level.ADMIN, str(subject.path))
    if is_rejecting(subject.path):
        raise InvalidNameError(
            f"subject '{subject}': the table's name is reserved for the rejected rows of another"
            " table"
        )
    make = functools.partial(new_table, bucket_count=service.config.kafka_partitions)
    descriptor = await service.run_blocking(make, subject, schema)
    if service.shards is not None:
        await service.shards.place(subject.path)
    try:
        return await service.manager.create_table(descriptor)
    except TableExistsError:
        # Another request has just registered this subject, or the other part of the topic.
        return service.table(str(subject.path))


async def _replacing(
    service: Service, table: OpenTable, subject: Subject, schema: AvroSchema
) -> TableDescriptor | None:
    """Return the replacement of `table` for a schema; None if `table` is changed or kept."""
    if not is_untouched(service.manager, table):
        return None
    return await service.run_blocking(replacement_table, table.info, subject, schema)


async def _replace_columns(
    service: Service, exchange: Exchange, table: OpenTable, subject: Subject, schema: AvroSchema
) -> None:
    """Give a raw table without rows the columns of the first schema."""
    while True:
        old_info = table.info
        replacement = await _replacing(service, table, subject, schema)
        if replacement is None:
            return
        service.access.require(exchange, Level.ADMIN, str(subject.path))
        if await with_other_columns(service.manager, table, old_info, replacement):
            return


async def _apply(service: Service, table: OpenTable, change: TableChange) -> None:
    manager = service.manager
    if change.schema:
        await manager.alter_schema(table.path, change.schema)
    if change.properties:
        await manager.alter_properties(table.path, updates=change.properties, removals=[])


def _check_topic(subject: Subject, table: OpenTable) -> None:
    properties = table.info.descriptor.properties
    if not is_same_topic(subject.topic, table.path, properties):
        raise InvalidNameError(
            f"subject '{subject}' would be of table '{table.path}', which is that of topic"
            f" '{topic_name_of(table.path, properties)}': use that name, or another one"
        )
