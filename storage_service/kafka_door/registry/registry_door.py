"""The schema registry over HTTP: the routes that serializers of Kafka's clients use.

Source: Confluent, "Schema Registry API reference".
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    NotOwnerError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.kafka.registry.schema_set import (
    RegisteredSchema,
    SchemaSet,
    compact,
    table_id_of,
)
from streamhouse.storage_service.kafka.registry.subjects import (
    REGISTRY_PATH,
    Subject,
    subject_name,
)
from streamhouse.storage_service.kafka.topics import TopicTable, first_created, table_paths_of
from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from streamhouse.storage_service.kafka_door._topic_places import (
    local_path,
    local_tables,
    path_of_new_topic,
    topic_table_of,
)
from streamhouse.storage_service.kafka_door.registry._registry_errors import (
    INVALID_LEVEL,
    INVALID_VERSION,
    NO_SCHEMA,
    NO_SUBJECT,
    NO_VERSION,
    NOT_PERMITTED,
    RegistryRefusedError,
    registry_error,
)
from streamhouse.storage_service.kafka_door.registry._schema_desk import (
    check_fits,
    register,
    subject_table,
    table_with_schema,
)
from streamhouse.storage_service.server.access.access import token_of
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.doors import Door
from streamhouse.storage_service.server.http.http_exchange import Body, HttpExchange
from streamhouse.storage_service.server.routes import (
    ANY,
    ANY_TOKEN,
    Answer,
    Route,
    RouteMatch,
)
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.peers import HANDED_ON, PeerAnswer, PeerRequest

__all__ = ["RegistryDoor"]

_LEVEL: Final = "BACKWARD"
_NUMBER: Final = re.compile(r"\d{1,10}", re.ASCII)
_LATEST: Final = ("latest", "-1")


def _row(method: str, path: str) -> Route:
    # The handler checks the grant on the table, which the subject or schema id names.
    return Route(
        method=method,
        path=REGISTRY_PATH + path,
        need=ANY_TOKEN,
        name="schema_registry",
        answer=Answer.DOOR,
        body=Body.SCHEMA,
        takes_password=True,
    )


class RegistryDoor(Door):
    """The schema registry, on the service's own address."""

    path = REGISTRY_PATH
    routes = (
        _row("GET", "/schemas/types"),
        _row("GET", "/schemas/ids/{id}"),
        _row("GET", "/schemas/ids/{id}/versions"),
        _row("GET", "/schemas/ids/{id}/subjects"),
        _row("GET", "/subjects"),
        _row("POST", "/subjects/{subject}"),
        _row("GET", "/subjects/{subject}/versions"),
        _row("POST", "/subjects/{subject}/versions"),
        _row("GET", "/subjects/{subject}/versions/{version}"),
        _row("POST", "/compatibility/subjects/{subject}/versions/{version}"),
        _row("GET", "/config"),
        _row("PUT", "/config"),
        _row("GET", "/config/{subject}"),
        _row("PUT", "/config/{subject}"),
        _row("GET", "/mode"),
        _row("GET", "/mode/{subject}"),
        # The registry answers unknown paths in the form of its protocol.
        _row(ANY, "/..."),
    )

    def open(self, service: Service) -> None:
        """See `Door.open`."""
        self._service = service

    async def answer(self, exchange: HttpExchange, match: RouteMatch) -> None:
        """Answer a request, for any shard."""
        service = self._service
        content_type = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if content_type == Body.JSON.content_type:
            exchange.body = Body.JSON
        async with service.held_body(exchange) as body:
            request = _Request(exchange, service, match.parameters, body)
            name = f"{exchange.method} {match.route.path.removeprefix(REGISTRY_PATH)}"
            try:
                of_peer = await request.handed_on()
                if of_peer is not None:
                    status, answer = of_peer.status, of_peer.body
                else:
                    value = await _ANSWERS.get(name, _Request.nothing)(request)
                    status, answer = 200, json.dumps(value).encode()
            except RegistryRefusedError as refused:
                status, value = refused.answer()
                answer = json.dumps(value).encode()
        service.answers.hold_built(exchange, len(answer), is_done=exchange.is_changing)
        await exchange.answer(status, Body.SCHEMA.content_type, [answer])

    async def answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        """Send an error in the form of the registry."""
        await exchange.answer_error(error, form=registry_error(error))


class _Request:
    def __init__(
        self, exchange: HttpExchange, service: Service, parameters: Mapping[str, str], body: bytes
    ) -> None:
        self._exchange = exchange
        self._service = service
        self._parameters = parameters
        self._body = body
        self._remote_path: TablePath | None = None
        """The table of the subject's topic, once other shards have answered."""

    @property
    def _subject(self) -> Subject:
        subject = Subject.parse(self._parameters["subject"])
        path = self._remote_path or local_path(self._service.manager, subject.topic)
        return dataclasses.replace(subject, path=path)

    # -- other shards ----------------------------------------------------------------------------

    async def handed_on(self) -> PeerAnswer | None:
        """Return the answer of the shard with the table; None if no other shard has the table."""
        shards = self._service.shards
        if shards is None:
            return None
        path = await self._path()
        if self._exchange.header(HANDED_ON) is not None:
            return None
        if path is None or self._service.manager.has_table(path):
            return None
        endpoint = await shards.endpoint_of(path)
        if endpoint is None and self._is_registering:
            self._service.access.require(self._exchange, Level.WRITE, str(path))
            try:
                await shards.place(path)
            except NotOwnerError as error:
                if error.owner is None:
                    raise
                endpoint = error.owner
        return None if endpoint is None else await self._ask(endpoint)

    async def _path(self) -> TablePath | None:
        """Return the table of the request, if known on this shard."""
        assert self._service.shards is not None
        if "subject" in self._parameters:
            self._remote_path = await self._path_of_topic(self._subject.topic)
            return self._remote_path
        if "id" not in self._parameters:
            return None
        table_id = table_id_of(self._schema_id())
        if any(t.info.table_id == table_id for t in self._service.manager.open_tables()):
            return None
        return await self._service.shards.path_elsewhere(table_id)

    async def _path_of_topic(self, topic: str) -> TablePath:
        """Return the table of a topic, on any shard."""
        shards, manager = self._service.shards, self._service.manager
        assert shards is not None
        paths = table_paths_of(topic)
        if len(paths) == 1:
            return paths[0]
        candidates = local_tables(manager, topic)
        for path in paths:
            endpoint = None if manager.has_table(path) else await shards.endpoint_of(path)
            if endpoint is not None:
                candidates += await self._table_at(endpoint, path)
        topic_table = first_created(topic, candidates)
        return (
            path_of_new_topic(topic, await shards.databases())
            if topic_table is None
            else topic_table.path
        )

    async def _table_at(self, endpoint: str, path: TablePath) -> list[TopicTable]:
        """Return a table of another shard, if the caller may see the table."""
        assert self._service.shards is not None
        bearer = (b"authorization", b"Bearer " + token_of(self._exchange))
        request = PeerRequest.of("GET", f"/v1/tables/{path}", [bearer])
        answer = await self._service.shards.peers.ask(endpoint, request)
        if answer.status != 200:
            return []
        return [topic_table_of(TableInfo.from_json(json.loads(answer.body)))]

    @property
    def _is_registering(self) -> bool:
        is_versions = self._exchange.path.endswith("/versions")
        return self._exchange.method == "POST" and is_versions

    async def _ask(self, endpoint: str) -> PeerAnswer:
        assert self._service.shards is not None
        query = self._exchange.scope["query_string"].decode("latin-1")
        target = self._exchange.raw_path + (f"?{query}" if query else "")
        headers = self._exchange.scope["headers"]
        request = PeerRequest.of(self._exchange.method, target, headers, body=self._body)
        return await self._service.shards.peers.ask(endpoint, request)

    # -- schemas by id ---------------------------------------------------------------------------

    def _schema_id(self) -> int:
        text = self._parameters["id"]
        if not _NUMBER.fullmatch(text):
            raise RegistryRefusedError(NO_SCHEMA, f"schema '{text[:80]}' is no id")
        return int(text)

    def _with_id(self) -> tuple[str, RegisteredSchema]:
        table_schema = table_with_schema(self._service, self._exchange, self._schema_id())
        if table_schema is None:
            # Unauthorised callers get the same answer, which does not reveal the table.
            raise RegistryRefusedError(NO_SCHEMA, f"there is no schema {self._schema_id()}")
        table, schema = table_schema
        properties = table.info.descriptor.properties
        return subject_name(table.path, properties, schema.part), schema

    async def types(self) -> Any:
        return ["AVRO"]

    async def by_id(self) -> Any:
        return {"schema": self._with_id()[1].text}

    async def versions_of_id(self) -> Any:
        subject, schema = self._with_id()
        return [{"subject": subject, "version": schema.version}]

    async def subjects_of_id(self) -> Any:
        return [self._with_id()[0]]

    # -- subjects --------------------------------------------------------------------------------

    async def subjects(self) -> Any:
        names = set(self._local_subjects())
        shards = self._service.shards
        if shards is not None and self._exchange.header(HANDED_ON) is None:
            states = await shards.states()
            other_owners = [
                s.owner for s in states if s.shard != shards.own and s.owner is not None
            ]
            endpoints = [o.endpoint for o in other_owners if o.is_live and o.endpoint is not None]
            for answer in await asyncio.gather(*map(self._ask, endpoints)):
                if answer.status == 200:
                    names.update(json.loads(answer.body))
        return sorted(names)

    def _local_subjects(self) -> list[str]:
        may = self._exchange.caller.may
        return [
            subject_name(table.path, table.info.descriptor.properties, part)
            for table in self._service.manager.open_tables()
            if may(Level.READ, str(table.path))
            for part in {schema.part for schema in schemas_of(table).known().schemas}
        ]

    def _schema_set(self, subject: Subject) -> SchemaSet:
        table = subject_table(self._service, self._exchange, subject)
        schema_set = schemas_of(table).current()
        if not schema_set.of(subject.part):
            raise RegistryRefusedError(NO_SUBJECT, f"subject '{subject}' has no schema")
        return schema_set

    async def versions(self) -> Any:
        subject = self._subject
        return [schema.version for schema in self._schema_set(subject).of(subject.part)]

    async def version(self) -> Any:
        subject, text = self._subject, self._parameters["version"]
        schema_set = self._schema_set(subject)
        of_part = schema_set.of(subject.part)
        if text in _LATEST:
            return _described(subject, schema_set, of_part[-1])
        if not _NUMBER.fullmatch(text) or int(text) < 1:
            raise RegistryRefusedError(
                INVALID_VERSION, f"version '{text[:80]}' is neither a number from 1 on nor 'latest'"
            )
        if int(text) > len(of_part):
            raise RegistryRefusedError(
                NO_VERSION,
                f"subject '{subject}' has {len(of_part)} versions, and no version {text}",
            )
        return _described(subject, schema_set, of_part[int(text) - 1])

    async def look_up(self) -> Any:
        subject = self._subject
        text = await self._schema_text()
        schema_set = self._schema_set(subject)
        schema = await self._service.run_blocking(
            lambda: schema_set.find(subject.part, compact(text))
        )
        if schema is None:
            raise RegistryRefusedError(NO_SCHEMA, f"subject '{subject}' has no such schema")
        return _described(subject, schema_set, schema)

    async def register(self) -> Any:
        subject = self._subject
        text = await self._schema_text()
        schema_set, schema = await register(self._service, self._exchange, subject, text)
        return _described(subject, schema_set, schema)

    async def compatibility(self) -> Any:
        try:
            text = await self._schema_text()
            await check_fits(self._service, self._exchange, self._subject, text)
        except InvalidRequestError as error:
            return {"is_compatible": False, "messages": [error.message]}
        return {"is_compatible": True}

    async def _schema_text(self) -> str:
        body = await self._json()
        kind, references = body.get("schemaType") or "AVRO", body.get("references")
        if kind != "AVRO":
            raise UnsupportedError(
                f"schemas of type {str(kind)[:80]!r} are not kept; columns are made of AVRO"
            )
        if references:
            raise UnsupportedError(
                "references between schemas are not known; put all types into one schema"
            )
        text = body.get("schema")
        if not isinstance(text, str):
            raise InvalidSchemaError("the request needs 'schema', the schema as a text")
        return text

    async def _json(self) -> dict[str, Any]:
        try:
            value = await self._service.run_by_size(json.loads, self._body)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequestError("the body is no JSON object")
        return value

    # -- settings of all subjects
    # ----------------------------------------------------------------------

    async def level(self) -> Any:
        return {"compatibilityLevel": _LEVEL}

    async def set_level(self) -> Any:
        if (await self._json()).get("compatibility") != _LEVEL:
            raise RegistryRefusedError(
                INVALID_LEVEL,
                f"the compatibility level is {_LEVEL} and does not change: the newest schema of a"
                " subject has every row of its table",
            )
        return {"compatibility": _LEVEL}

    async def mode(self) -> Any:
        return {"mode": "READWRITE"}

    async def nothing(self) -> Any:
        raise RegistryRefusedError(
            NOT_PERMITTED if self._exchange.method == "DELETE" else 40400,
            f"{self._exchange.method} {self._exchange.path[:200]} is not supported by the registry;"
            " schemas are kept as long as their table",
        )


def _described(subject: Subject, schema_set: SchemaSet, schema: RegisteredSchema) -> dict[str, Any]:
    return {
        "subject": str(subject),
        "id": schema_set.id_of(schema),
        "version": schema.version,
        "schema": schema.text,
    }


_ANSWERS: Final[Mapping[str, Callable[[_Request], Awaitable[Any]]]] = {
    "GET /schemas/types": _Request.types,
    "GET /schemas/ids/{id}": _Request.by_id,
    "GET /schemas/ids/{id}/versions": _Request.versions_of_id,
    "GET /schemas/ids/{id}/subjects": _Request.subjects_of_id,
    "GET /subjects": _Request.subjects,
    "POST /subjects/{subject}": _Request.look_up,
    "GET /subjects/{subject}/versions": _Request.versions,
    "POST /subjects/{subject}/versions": _Request.register,
    "GET /subjects/{subject}/versions/{version}": _Request.version,
    "POST /compatibility/subjects/{subject}/versions/{version}": _Request.compatibility,
    "GET /config": _Request.level,
    "PUT /config": _Request.set_level,
    "GET /config/{subject}": _Request.level,
    "PUT /config/{subject}": _Request.set_level,
    "GET /mode": _Request.mode,
    "GET /mode/{subject}": _Request.mode,
}
