"""The library that reads and writes Avro, behind errors of our own.

It raises `ValueError` for what it does not take, and where it panics something that is no
`Exception`, which would end whatever asked. All of that is a `SchemaMismatchError` here.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError, UnsupportedError
from streamhouse.storage_service.kafka.avro_schema import AvroSchema
from streamhouse.storage_service.kafka.errors import is_bug

__all__ = ["check_known", "read_values", "write_rows"]

_SAID_MAX: Final = 300
_ZEROS: Final = bytes(1 << 15)
"""A value of any schema: no numbers but 0, no texts, no items, the first branch of each union."""


def check_known(schema: AvroSchema) -> None:
    """Raise `UnsupportedError` for a schema whose values the library does not read, or write.

    Without the library, which comes with the extra `kafka`, no records are read at all.
    """
    if importlib.util.find_spec("pyruhvro") is None:
        return
    try:
        write_rows(read_values([_ZEROS], schema), schema)
    except SchemaMismatchError as error:
        raise UnsupportedError(
            f"the schema is one that the service could not read records by: {error.message}; write"
            " it with records, arrays, maps, enums and unions of null and one type"
        ) from error


def read_values(bodies: Sequence[bytes], schema: AvroSchema) -> pa.RecordBatch:
    """Return values of a schema as the library has them, a column for each field."""
    import pyruhvro

    with _own_errors():
        found = pyruhvro.deserialize_array(bodies, schema.plain)
        found.validate()
        return found


def write_rows(rows: pa.RecordBatch, schema: AvroSchema) -> pa.BinaryArray:
    """Return rows, which the library must know as they are, as values of a schema."""
    import pyruhvro

    with _own_errors():
        return pa.concat_arrays(pyruhvro.serialize_record_batch(rows, schema.plain, 1))


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not is_bug(error):
            raise
        raise SchemaMismatchError(str(error)[:_SAID_MAX]) from error
