"""The Avro library, with errors of this project.

The library raises `ValueError` for unsupported values. A panic of the library raises a class that
is no `Exception`, and would end the process. This module turns both into `SchemaMismatchError`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError, UnsupportedError
from streamhouse.storage_service.kafka.avro_schema import AvroSchema
from streamhouse.storage_service.kafka.protocol_errors import is_bug

__all__ = ["check_known", "read_values", "write_rows"]

_MESSAGE_CHARACTERS_MAX: Final = 300
_ZEROS: Final = bytes(1 << 15)
"""A value of any schema: zeros, empty texts and lists, and the first branch of each union."""


def check_known(schema: AvroSchema) -> None:
    """Raise `UnsupportedError` for a schema whose values the library cannot read or write.

    Without the library, which comes with the extra `kafka`, nothing is checked.
    """
    if importlib.util.find_spec("pyruhvro") is None:
        return
    try:
        write_rows(read_values([_ZEROS], schema), schema)
    except SchemaMismatchError as error:
        raise UnsupportedError(
            f"the service could not read records with this schema: {error.message}; write the"
            " schema with records, arrays, maps, enums and unions of null and one type"
        ) from error


def read_values(bodies: Sequence[bytes], schema: AvroSchema) -> pa.RecordBatch:
    """Return values of a schema in the library's form, with a column for each field."""
    import pyruhvro  # noqa: PLC0415 - pyruhvro is an extra

    with _translated_errors():
        rows = pyruhvro.deserialize_array(bodies, schema.plain)
        rows.validate()
        return rows


def write_rows(rows: pa.RecordBatch, schema: AvroSchema) -> pa.BinaryArray:
    """Return rows, in the library's form, as values of a schema."""
    import pyruhvro  # noqa: PLC0415 - pyruhvro is an extra

    with _translated_errors():
        return pa.concat_arrays(pyruhvro.serialize_record_batch(rows, schema.plain, 1))


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not is_bug(error):
            raise
        raise SchemaMismatchError(str(error)[:_MESSAGE_CHARACTERS_MAX]) from error
