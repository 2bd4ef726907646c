"""What the library of Avro raises, and where it panics, is an error of ours."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import SchemaMismatchError, UnsupportedError
from streamhouse.storage_service.kafka.avro_library import check_known, read_values, write_rows
from streamhouse.storage_service.kafka.avro_schema import AvroSchema, avro_schema


def _record(**fields: Any) -> str:
    named = [{"name": name, "type": kind} for name, kind in fields.items()]
    return json.dumps({"type": "record", "name": "r", "fields": named})


def _as_it_is(plain: str) -> AvroSchema:
    """Return a schema that the library gets as it is, though no parser of ours would give it."""
    return AvroSchema(fields=[], plain=plain, is_wrapped=False)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (_record(a="bytes"), "not implemented"),
        ('"int"', "not implemented"),
        (_record(a="other"), "other"),
        (_record(a=["null", ["null", "int"]]), "Unions may not directly contain a union"),
    ],
)
def test_a_schema_that_the_library_does_not_read_is_an_error(plain: str, said: str) -> None:
    schema = _as_it_is(plain)

    with pytest.raises(SchemaMismatchError, match=said):
        read_values([b"\2x"], schema)
    with pytest.raises(
        UnsupportedError, match=f"could not read records with this schema: .*{said}.*; write"
    ):
        check_known(schema)


def test_values_and_rows_that_the_library_does_not_take_are_an_error() -> None:
    schema = avro_schema(_record(a="string"))

    assert read_values([b"\2x"], schema).to_pylist() == [{"a": "x"}]
    with pytest.raises(SchemaMismatchError):
        read_values([b"\xff"], schema)
    rows = pa.record_batch({"a": pa.array(["x", "y"])})
    assert write_rows(rows, schema).to_pylist() == [b"\2x", b"\2y"]
    for wrong in (pa.record_batch({"a": pa.array([1])}), pa.record_batch({"b": pa.array(["x"])})):
        with pytest.raises(SchemaMismatchError):
            write_rows(wrong, schema)


def test_what_ends_a_program_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyruhvro.deserialize_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_values([], avro_schema('"int"'))
