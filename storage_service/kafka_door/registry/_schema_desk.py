"""Schemas registered, found and kept up with their tables, for who may do that with the table."""

from __future__ import annotations

import functools

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    TableExistsError,
)
from streamhouse.core.model.records.record_format import KeyFormat, ValueFormat
from streamhouse.core.model.rejected.companion import is_rejecting
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.storage_service.engine.column_replacement import (
    is_untouched,
    may_have_rows,
    with_other_columns,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.avro_library import check_known
from streamhouse.storage_service.kafka.avro_schema import AvroSchema, avro_schema, known_schema
from streamhouse.storage_service.kafka.registry.fitting import (
    TableChange,
    change_for,
    check_says_all,
    check_says_rows,
    new_table,
    reading_schema,
    table_in_place_of,
)
from streamhouse.storage_service.kafka.registry.schema_set import (
    RegisteredSchema,
    SchemaSet,
    compact,
    table_id_of,
)
from streamhouse.storage_service.kafka.registry.subjects import Part, Subject
from streamhouse.storage_service.kafka.topics import is_same_topic, topic_name_of
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
    """Return the table of a subject, for who may read it.

    Raises `ForbiddenError`, whether it exists or not, and `TableNotFoundError`.
    """
    service.access.require(exchange, Level.READ, str(subject.path))
    table = service.readable(str(subject.path))
    _check_topic(subject, table)
    return table


def table_with_schema(
    service: Service, exchange: Exchange, schema_id: int
) -> tuple[OpenTable, RegisteredSchema] | None:
    """Return the schema with an id, and its table; None if the caller may read none with it."""
    table_id = table_id_of(schema_id)
    for table in service.manager.open_tables():
        if table.info.table_id != table_id:
            continue
        if not exchange.caller.may(Level.READ, str(table.path)):
            return None
        service.manager.check_readable(table)
        try:
            return table, table.record_schemas.current().with_id(schema_id)
        except NotFoundError:
            return None
    return None


async def register(
    service: Service, exchange: Exchange, subject: Subject, text: str
) -> tuple[SchemaSet, RegisteredSchema]:
    """Return a schema, and the table's schemas; it is durable, and the table has its values.

    A subject whose topic has no table gets one, with the schema's columns; so does one whose table
    a client has made by asking for the topic, if it never had a row. Any other table is changed as
    far as schemas change. Who only writes may register what fits.

    Raises `ForbiddenError`, `SchemaMismatchError` if the table does not become what the schema
    needs, and as the making and the change of a table.
    """
    service.access.require(exchange, Level.WRITE, str(subject.path))
    text = await service.run_blocking(compact, text)
    already = await _fitting_already(service, subject, text)
    if already is not None:
        return already
    schema = await service.run_blocking(_readable, text)
    table = await _found_or_made(service, exchange, subject, schema)
    _check_topic(subject, table)
    schemas = table.record_schemas
    async with schemas.changing:
        # Before the table changes: what cannot be registered changes nothing.
        known, found = await service.run_blocking(_added, schemas.current(), subject.part, text)
        await _replace_columns(service, exchange, table, subject, schema)
        change = await _change(service, table, subject, schema, text)
        if change:
            service.access.require(exchange, Level.ADMIN, str(subject.path))
            await _apply(service, table, change)
        info = await _keep_with_reading_schemas(table, known)
        if await service.run_blocking(_is_unchanging, info, subject, schema):
            schemas.found_fitting(info, found.number)
        return schemas.current(), found


async def check_fits(service: Service, exchange: Exchange, subject: Subject, text: str) -> None:
    """Raise as `register` would if a schema does not fit; nothing is changed."""
    table = subject_table(service, exchange, subject)
    text = await service.run_blocking(compact, text)
    schema = await service.run_blocking(_readable, text)
    if await _replacing(service, table, subject, schema) is None:
        await _change(service, table, subject, schema, text)


async def keep_reading_schemas(table: OpenTable) -> None:
    """Register schemas of a table whose records are Avro, as it is now, unless the newest have it.

    So it can be read after its columns were changed otherwise, and if nobody has registered any.
    """
    schemas = table.record_schemas
    if schemas.do_fit(table.info) or not _avro_parts(table.info):
        return
    async with schemas.changing:
        if not schemas.do_fit(table.info):
            await _keep_with_reading_schemas(table, schemas.current())


async def _keep_with_reading_schemas(table: OpenTable, known: SchemaSet) -> TableInfo:
    """Keep schemas, and those that have all rows of a table; return the table they have it of.

    For who holds `changing`: the schemas stay, and the table may change meanwhile.
    """
    schemas = table.record_schemas
    while True:
        info = table.info
        whole = await schemas.run(_with_reading_schemas, info, known)
        whole = whole.named_by(info.schema_id, since=len(schemas.current().schemas))
        if table.info is info:
            break
    await schemas.keep(whole)
    schemas.found_fitting(info)
    return info


# -- what takes long with wide schemas: functions for threads ------------------------------------


def _readable(text: str) -> AvroSchema:
    """Return a schema by which records can be read; raises `InvalidRequestError` otherwise."""
    schema = avro_schema(text)
    check_known(schema)
    return schema


def _added(known: SchemaSet, part: Part, text: str) -> tuple[SchemaSet, RegisteredSchema]:
    whole = known.with_schema(part, text)
    found = whole.find(part, text)
    assert found is not None, "just added"
    return whole, found


def _checked_change(
    info: TableInfo,
    subject: Subject,
    schema: AvroSchema,
    text: str,
    known: SchemaSet,
    has_rows: bool,
) -> TableChange:
    """Return what `change_for` does.

    Raises unless a schema, if it is new, says all that the newest one does, or the rows do.
    """
    change = change_for(info, subject, schema)
    own = known.of(subject.part)
    if not own and has_rows:
        check_says_rows(subject, schema, info)
    if own and known.find(subject.part, text) is None:
        check_says_all(subject, schema, known_schema(own[-1].text))
    return change


def _is_unchanging(info: TableInfo, subject: Subject, schema: AvroSchema) -> bool:
    try:
        return not change_for(info, subject, schema)
    except InvalidRequestError:
        # The table has just been changed otherwise; whoever registers again is told so.
        return False


def _with_reading_schemas(info: TableInfo, known: SchemaSet) -> SchemaSet:
    for part in _avro_parts(info):
        own = known.of(part)
        missing = reading_schema(
            info, part, own[-1].text if own else None, bytes_max=known.room_bytes
        )
        if missing is not None:
            known = known.with_newest(part, missing)
    return known


def _avro_parts(info: TableInfo) -> list[Part]:
    form = info.descriptor.record_format()
    parts = [Part.VALUE] if form.value is ValueFormat.AVRO else []
    return [*parts, Part.KEY] if form.key is KeyFormat.AVRO and form.key_columns else parts


# -- the table -----------------------------------------------------------------------------------


async def _fitting_already(
    service: Service, subject: Subject, text: str
) -> tuple[SchemaSet, RegisteredSchema] | None:
    """Return a schema that is registered, if its table has been found to need nothing for it.

    Serializers register what they send each time they start.
    """
    try:
        table = service.table(str(subject.path))
    except NotFoundError:
        return None
    _check_topic(subject, table)
    schemas = table.record_schemas
    known = schemas.current()
    found = await service.run_blocking(known.find, subject.part, text)
    if found is None or not schemas.do_fit(table.info, found.number):
        return None
    return known, found


async def _change(
    service: Service, table: OpenTable, subject: Subject, schema: AvroSchema, text: str
) -> TableChange:
    """Return what changes of a table as it is; raises as `_checked_change`."""
    while True:
        info, known = table.info, table.record_schemas.current()
        has_rows = may_have_rows(service.manager, table)
        change = await service.run_blocking(
            _checked_change, info, subject, schema, text, known, has_rows
        )
        if table.info is info:
            return change


async def _found_or_made(
    service: Service, exchange: Exchange, subject: Subject, schema: AvroSchema
) -> OpenTable:
    try:
        return service.table(str(subject.path))
    except NotFoundError:
        # Its database may be one that another shard has made.
        service.access.require(exchange, Level.ADMIN, str(subject.path))
    if is_rejecting(subject.path):
        raise InvalidNameError(
            f"subject '{subject}': its table would have the rejected rows of another one"
        )
    make = functools.partial(new_table, bucket_count=service.config.kafka_partitions)
    descriptor = await service.run_blocking(make, subject, schema)
    if service.shards is not None:
        await service.shards.place(subject.path)
    try:
        return await service.manager.create_table(descriptor)
    except TableExistsError:
        # Somebody else has just registered this one, or its other part.
        return service.table(str(subject.path))


async def _replacing(
    service: Service, table: OpenTable, subject: Subject, schema: AvroSchema
) -> TableDescriptor | None:
    """Return what takes the place of a table for a schema, None if the table is changed or kept."""
    if not is_untouched(service.manager, table):
        return None
    return await service.run_blocking(table_in_place_of, table.info, subject, schema)


async def _replace_columns(
    service: Service, exchange: Exchange, table: OpenTable, subject: Subject, schema: AvroSchema
) -> None:
    """Make a raw table that never had a row what registering first would have made."""
    while True:
        before = table.info
        wanted = await _replacing(service, table, subject, schema)
        if wanted is None:
            return
        service.access.require(exchange, Level.ADMIN, str(subject.path))
        if await with_other_columns(service.manager, table, before, wanted):
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
