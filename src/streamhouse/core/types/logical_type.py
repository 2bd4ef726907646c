"""A logical type: a column's type with every form that values of the type have in the system.

`LogicalType` lists the forms. A form is a method, a function of a value or a column, or a fact;
None and `no_form` say that the type has no such form. A class that lacks an entry fails mypy and
`tests/unit/core/types`. `registry` gives the logical type of an Arrow type (decision 28).

Outside this room a new type needs a name in `core/model/schema.py`, and its counterparts in other
systems: `lake/tables/_column_types.py`, `cdc_source/_source_types.py`,
`connector/write/_spark_types.py`, the literals of predicates in `reading/where/_literal.py`, and
the two tables that `tests/unit/core/types` compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.json_values import json_value
from streamhouse.core.model.values.zone import Zone

__all__ = [
    "NULL_KEY",
    "ORDERED",
    "ConvertPart",
    "LogicalType",
    "OutsideOfPythonError",
    "PlainValue",
    "any_json_text",
    "fixed_width_keys",
    "no_form",
    "plain_texts",
    "raw_values",
    "trimmed",
]

NULL_KEY: Final = b"\x00"
"""A null as a part of a key; the byte `01` begins every other value."""
ORDERED: Final = frozenset(("min", "max"))
"""The aggregates of every type with an order."""


PlainValue: TypeAlias = bool | int | float | str | bytes | Decimal
"""A value as Python has it; of a date the days since 1970-01-01, of a timestamp microseconds."""


class OutsideOfPythonError(ValueError):
    """A date or timestamp that Python cannot hold."""


ConvertPart: TypeAlias = Callable[[Any, pa.Field, "LogicalType"], Any]


class LogicalType(Protocol):
    """The forms of one type of column, with the canonical Arrow type `arrow`."""

    arrow: pa.DataType

    def __init__(self, arrow: pa.DataType) -> None:
        self.arrow = arrow

    @property
    def name(self) -> str:
        """The type's name in messages, as Spark writes it."""
        return type_name(self.arrow)

    # -- JSON and texts: `model.values.json_values` says what they are -------------------------

    json_types: frozenset[type]
    """The types of JSON's values that Arrow takes without a change."""
    json_texts: Callable[[pa.Array], pa.LargeStringArray]
    """Every value of a column as JSON; a null stays null."""
    json_text: Callable[[Any], str]
    """A Python value as JSON."""
    of_json: Callable[[Any], Any] | None
    """A value read from JSON as the Python value that Arrow gives; None for the identity.
    Raises `OutsideOfPythonError` for a time that Python cannot hold."""
    value_of_text: Callable[[str], Any]
    """The value of a text of `json_value`; raises ValueError or ArithmeticError for another."""
    values_of_texts: Callable[[pa.Array], pa.Array]
    """The values of texts; raises `ArrowInvalid` or `SchemaMismatchError` for another text."""
    url_text: Callable[[Any], str | None]
    """A Python value as a part of a URL; None for a value of another type."""
    arrow_json_type: pa.DataType | None
    """The type with which Arrow reads a column of JSON; None if Arrow cannot read the column."""

    spark_texts: Callable[[pa.Array, Zone], pa.Array] | None
    """The values as Spark's cast to a string writes them, moments in a zone; None if Spark refuses.
    Raises `ArrowInvalid` for bytes outside of UTF-8."""

    # -- Python values -------------------------------------------------------------------------

    python_types: frozenset[type]
    """The types of Python values that Arrow takes exactly, or refuses."""

    of_python: Callable[[Any], Any]
    """A plain Python value for `pa.array`, which alone would silently cut off a fraction, take
    bytes for a text, a wall clock time for a moment, or a text for a list of letters. Raises
    `UnfitError`, whose message says what to give instead."""

    def with_parts(self, value: Any, _: ConvertPart) -> Any:
        """Return a Python value of a nested type with every part converted.

        Raises `UnfitError` for a value of another type.
        """
        return no_form(value)

    def are_plain(self, values: Sequence[Any]) -> bool:
        """Whether Arrow takes all values exactly, or refuses them."""
        return self.python_types.issuperset(map(type, values))

    # -- facts of a type -----------------------------------------------------------------------

    aggregates: frozenset[str]
    """The aggregates of the merge engine that the type needs to allow: `model.merge_engine`."""
    day: int | None
    """A day as stored values of a date or timestamp; None for another type."""
    least: int | Decimal | None
    """The least value as a stored number or a decimal; None for a type without one."""

    # -- Iceberg: transforms, and bounds in single-value serialisation (spec, appendix D) ---------

    iceberg_name: str | None
    """Iceberg's name of a simple type without parameters."""
    transforms: frozenset[str]
    """The partition transforms that take the type."""
    of_bound: Callable[[bytes], PlainValue | None]
    """A manifest's bound as a plain value; None for bytes that are no bound."""
    of_footer: Callable[[Any], PlainValue | None]
    """A raw bound of a Parquet footer as a plain value; None for another value."""
    lower_bound: Callable[[Any, int | None], bytes | None]
    """A raw minimum of a footer as a manifest's bound of at most `length` characters or bytes."""
    upper_bound: Callable[[Any, int | None], bytes | None]
    """A raw maximum as a bound; None where no short value is above the maximum."""

    # -- schemas of other systems ----------------------------------------------------------------

    avro: str | Mapping[str, Any] | None
    """The type in an Avro schema; None for a nested type, which has parts."""

    # -- keys: `model.bucketing.encode_key` says what the bytes are ----------------------------

    key_bytes: Callable[[Any], bytes]
    """A Python value as part of a key, without the byte that marks a value. Raises TypeError,
    ValueError, OverflowError or a decimal signal for a value of another type."""
    stored_key_bytes: Callable[[Any], bytes] | None
    """A stored value as part of a key, with the byte that marks a value."""
    few_keys: Callable[[pa.Array], list[bytes]] | None
    """The parts of keys of few rows; None where kernels are faster."""
    keys: Callable[[pa.Array], pa.Array]
    """The parts of keys of many rows; a null may stay null."""

    # -- buckets: Iceberg's hash (spec, appendix B); None where the transform refuses the type ----

    hashed_bytes: Callable[[Any], bytes] | None
    """The bytes that Iceberg hashes of a Python value."""
    few_hashed: Callable[[pa.Array], Sequence[bytes | None]] | None
    """The bytes that Iceberg hashes of few rows; None where kernels are faster."""
    hashes: Callable[[pa.Array], npt.NDArray[np.uint32]] | None
    """The hash of every value; a null has an arbitrary hash."""

    # -- rows by key: `storage_service/kv/rows/_row_layout.py` says what the bytes are -----------

    stored_dtype: np.dtype[Any] | None
    """The type of a stored value; None for a variable width."""
    stored_view: pa.DataType | None
    """The Arrow type that shows stored values as Python values; None for `arrow` itself."""
    of_stored: Callable[[Any], Any] | None
    """A stored value as Python value; None for the identity."""


def trimmed(texts: pa.Array) -> pa.Array:
    """Return texts without the blanks around them."""
    return pc.utf8_trim_whitespace(texts)


def plain_texts(column: pa.Array, _: Zone) -> pa.Array:
    """Return Arrow's texts, which for most types are Spark's too."""
    return column.cast(pa.string())


def no_form(*values: Any) -> Any:
    """Raise TypeError: callers never ask for a form that a type lacks."""
    raise TypeError(f"a value of this type has no such form: {str(values)[:80]}")


def any_json_text(value: Any) -> str:
    """Return a Python value of any type as JSON."""
    return json.dumps(json_value(value))


def raw_values(column: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the stored values, including the bytes under nulls."""
    data = column.buffers()[1]
    if data is None:
        return np.zeros(len(column), dtype=dtype)
    return np.frombuffer(data, dtype=dtype, count=column.offset + len(column))[column.offset :]


def fixed_width_keys(column: pa.Array, numbers: npt.NDArray[Any]) -> pa.Array:
    """Return big-endian numbers, or rows of bytes, as parts of keys; null where `column` is."""
    if numbers.ndim == 1:
        big_endian = numbers.astype(numbers.dtype.newbyteorder(">"))
        numbers = big_endian.view(np.uint8).reshape(-1, numbers.dtype.itemsize)
    rows = np.empty((len(column), numbers.shape[1] + 1), dtype=np.uint8)
    rows[:, 0] = 1
    rows[:, 1:] = numbers
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    encoded = pa.Array.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )
    if column.null_count == 0:
        return encoded
    return pc.if_else(column.is_valid(), encoded, pa.scalar(None, pa.binary()))
