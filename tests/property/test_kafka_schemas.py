"""Schemas of Avro that are taken, and those made of them, are read by its library and its rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.kafka.avro_library import check_known
from streamhouse.storage_service.kafka.avro_schema import avro_schema
from streamhouse.storage_service.kafka.registry.fitting import (
    change_for,
    check_covers_schema,
    new_table,
    reading_schema,
)
from streamhouse.storage_service.kafka.registry.schema_set import SCHEMA_BYTES_MAX, compact
from streamhouse.storage_service.kafka.registry.subjects import Part, Subject
from tests.support.examples import examples

_PRIMITIVES: Final = ("boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL: Final = ("date", "timestamp-millis", "timestamp-micros", "uuid", "decimal")
_SUBJECT: Final = Subject.parse("orders-value")


class _Maker:
    """Schemas that often are what Avro has, and never quite as plain as those of a generator."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._names: list[str] = []

    def schema(self) -> Any:
        made = self._record(0)
        match self._random.randrange(20):
            case 0:
                return [made]
            case 1:
                return {"type": made}
        return made

    def _type(self, depth: int) -> Any:
        pick = self._random.choice
        choice = self._random.randrange(16)
        if choice < 6 or depth > 4:
            return pick(_PRIMITIVES)
        match choice:
            case 6 | 7 if self._names:
                return pick(self._names)
            case 8:
                logical = {"logicalType": pick(_LOGICAL), "precision": 9}
                return {"type": pick(["int", "long", "bytes"]), **logical}
            case 9:
                symbols = self._random.sample("ABC", self._random.randint(1, 3))
                return {**self._named("enum"), "symbols": symbols}
            case 10:
                return {"type": "array", "items": self._type(depth + 1)}
            case 11:
                return {"type": "map", "values": self._type(depth + 1)}
            case 12 | 13:
                one = self._type(depth + 1)
                return pick([["null", one], [one, "null"], [one]])
            case 14:
                return {"type": self._type(depth + 1)}
        return self._record(depth + 1)

    def _record(self, depth: int) -> dict[str, Any]:
        named = self._named("record")
        fields = [
            {"name": f"f{number}", "type": self._type(depth)}
            for number in range(self._random.randint(1, 3))
        ]
        return {**named, "fields": fields}

    def _named(self, kind: str) -> dict[str, Any]:
        name = f"T{len(self._names)}"
        space = self._random.choice([None, None, None, "", "x", "x.y"])
        self._names.append(self._random.choice([name, f"{space}.{name}" if space else name]))
        return {"type": kind, "name": name, **({} if space is None else {"namespace": space})}


def _check_rules(value: Any, defined: set[str], space: str = "") -> None:
    """Check what Avro says of unions and names, by its specification alone."""
    if isinstance(value, str):
        full = value if "." in value or not space else f"{space}.{value}"
        assert value in (*_PRIMITIVES, "null") or full in defined, f"'{full}' is defined nowhere"
    elif isinstance(value, list):
        unwrapped = [_unwrapped(branch) for branch in value]
        assert not any(isinstance(branch, list) for branch in unwrapped), "a union in a union"
        for branch in value:
            _check_rules(branch, defined, space)
    elif value["type"] in ("record", "enum"):
        space = value.get("namespace", space)
        full = f"{space}.{value['name']}" if space else value["name"]
        assert full not in defined, f"'{full}' is defined again"
        defined.add(full)
        for field in value.get("fields", ()):
            _check_rules(field["type"], defined, space)
    else:
        inside = {"array": "items", "map": "values"}.get(str(value["type"]), "type")
        _check_rules(value[inside], defined, space)


def _unwrapped(value: Any) -> Any:
    while isinstance(value, dict) and isinstance(value["type"], dict | list):
        value = value["type"]
    return value


def _changed(random: Random, info: TableInfo) -> TableInfo:
    """Return a table after changes that schemas, SQL or HTTP make of it."""
    fields = list(info.schema.to_arrow())
    random.shuffle(fields)
    fields = [one.with_nullable(True) if random.random() < 0.5 else one for one in fields]
    if random.random() < 0.3:
        fields.pop()
    if random.random() < 0.5 or not fields:
        name = f"more{random.getrandbits(32)}"
        fields.append(pa.field(name, random.choice([pa.string(), pa.list_(pa.int64())])))
    return _table(info, fields)


def _table(info: TableInfo, fields: Sequence[pa.Field]) -> TableInfo:
    schema = Schema.from_arrow(pa.schema(fields))
    return replace(info, descriptor=replace(info.descriptor, schema=schema))


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_schema_that_is_taken_has_schemas_that_are_read_whatever_becomes_of_its_table(
    seed: int,
) -> None:
    random = Random(seed)
    text = compact(json.dumps(_Maker(random).schema()))
    try:
        schema = avro_schema(text)
        descriptor = new_table(_SUBJECT, schema, bucket_count=1)
    except InvalidRequestError:
        return
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)

    check_known(schema)
    _check_rules(json.loads(text), set())
    assert not change_for(info, _SUBJECT, schema)
    check_covers_schema(_SUBJECT, schema, schema)
    assert reading_schema(info, Part.VALUE, text, bytes_max=SCHEMA_BYTES_MAX) is None
    for _ in range(3):
        info = _changed(random, info)
        made = reading_schema(info, Part.VALUE, text, bytes_max=SCHEMA_BYTES_MAX)
        if made is None:
            continue
        text = made
        check_known(avro_schema(made))
        _check_rules(json.loads(made), set())
        assert reading_schema(info, Part.VALUE, made, bytes_max=SCHEMA_BYTES_MAX) is None
