"""Schemas of one table: numbers, ids, limits, and files that are none of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    UnsupportedError,
)
from streamhouse.storage_service.kafka.registry.schema_set import (
    BYTES_MAX,
    PRODUCER_BYTES_MAX,
    PRODUCER_SCHEMAS_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMAS_MAX,
    SchemaSet,
    compact,
    table_id_of,
)
from streamhouse.storage_service.kafka.registry.subjects import Part


def _text(number: int) -> str:
    fields = [{"name": f"f{number}", "type": "long"}]
    return json.dumps({"type": "record", "name": "r", "fields": fields})


def _full(table_id: int) -> SchemaSet:
    made = SchemaSet(table_id)
    for number in range(SCHEMAS_MAX):
        with_one = made.with_schema if number < PRODUCER_SCHEMAS_MAX else made.with_newest
        made = with_one(Part.VALUE if number % 2 else Part.KEY, _text(number))
    return made


def test_ids_of_neighbours_never_meet() -> None:
    ids = [made.id_of(one) for made in (_full(7), _full(8)) for one in made.schemas]

    assert len(set(ids)) == 2 * SCHEMAS_MAX
    assert [table_id_of(number) for number in ids] == [7] * SCHEMAS_MAX + [8] * SCHEMAS_MAX
    assert all(_full(7).with_id(number) for number in ids[:3])
    with pytest.raises(NotFoundError):
        _full(7).with_id(ids[-1])


def test_ids_have_31_bits() -> None:
    last = SchemaSet(2_147_482).with_schema(Part.KEY, '"string"')
    assert last.id_of(last.schemas[0]) < 1 << 31
    with pytest.raises(UnsupportedError, match="31 bits"):
        SchemaSet(2_147_484).with_schema(Part.KEY, '"string"')


def test_limits() -> None:
    with pytest.raises(OverloadedError, match="999 schemas"):
        _full(1).with_newest(Part.KEY, '"string"')
    with pytest.raises(RequestTooLargeError):
        compact(json.dumps("x" * SCHEMA_BYTES_MAX))


def test_producers_leave_numbers_for_the_service() -> None:
    made = SchemaSet(1, _full(1).schemas[:PRODUCER_SCHEMAS_MAX])

    with pytest.raises(OverloadedError, match="899 schemas of records, and there may be 899"):
        made.with_schema(Part.VALUE, _text(-1))
    assert made.with_schema(Part.VALUE, _text(1)) is made
    for number in range(SCHEMAS_MAX - PRODUCER_SCHEMAS_MAX):
        made = made.with_newest(Part.VALUE, _text(-1 - number))
    assert len(made.schemas) == SCHEMAS_MAX


def test_producers_leave_bytes_for_the_service() -> None:
    made = SchemaSet(1)
    assert made.room_bytes == SCHEMA_BYTES_MAX
    filler = "x" * (SCHEMA_BYTES_MAX - 20)
    for number in range(PRODUCER_BYTES_MAX // SCHEMA_BYTES_MAX):
        made = made.with_schema(Part.KEY, json.dumps(f"{filler}{number}"))
    with pytest.raises(OverloadedError, match="bytes together"):
        made.with_schema(Part.KEY, json.dumps(f"{filler}-"))

    # Each of the numbers that are left has its part of the bytes that are.
    for number in range(SCHEMAS_MAX - PRODUCER_SCHEMAS_MAX):
        room = made.room_bytes
        assert room > 5_000
        made = made.with_newest(Part.KEY, json.dumps(f"{number:03}".ljust(room - 2)))
    # What columns need may be more, as far as there is room at all.
    with pytest.raises(OverloadedError, match="bytes together"):
        SchemaSet(1, made.schemas[:-1]).with_newest(Part.KEY, json.dumps("x" * BYTES_MAX))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1", "", "{}}", '"\\ud800"'])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="schema"):
        compact(text)


def test_a_name_needs_no_quotes() -> None:
    assert compact("string") == compact(' "string" ') == '"string"'


def test_a_file_is_read_as_it_was_written() -> None:
    made = _full(3)
    assert SchemaSet.from_json(3, json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"version": 2},
        {"part": "other"},
        {"schema": "{"},
    ],
)
def test_a_file_that_says_something_else_is_refused(change: dict[str, Any]) -> None:
    content = SchemaSet(3).with_schema(Part.KEY, '"string"').to_json()
    content["schemas"][0].update(change)
    with pytest.raises(ValueError, match=r"schema|Part|Expecting"):
        SchemaSet.from_json(3, content)
