"""The extremes of every type, as rows, and rows of any reader in a form that compares exactly.

Dates, times and floats are compared by their bits: Python has no objects for most of these dates
and times, and finds no NaN equal to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["EXTREMES", "TIMES", "decimals", "extreme_rows", "raw", "raw_rows", "same_rows", "times"]

LAST_CHARACTER: Final = "\U0010ffff"
DAYS: Final = (-(2**31), -719_163, -719_162, -1, 0, 2_932_896, 2_932_897, 2**31 - 1)
MICROSECONDS: Final = (
    -(2**63),
    -62_135_596_800_000_001,
    -1,
    0,
    253_402_300_799_999_999,
    253_402_300_800_000_000,
    2**63 - 1,
)
FLOATS: Final = (
    *(float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 5e-324, -5e-324),
    *(1.7976931348623157e308, -1.7976931348623157e308, 3.4028234663852886e38, 1e-45),
)
NAN_PAYLOADS: Final = (0x7FF0_0000_0000_0001, 0xFFF8_0000_0000_0001, 0x7FFF_FFFF_FFFF_FFFF)
TEXTS: Final = (
    *(
        "",
        "\0",
        "\0\0a",
        "null",
        "NULL",
        "None",
        "..",
        "/",
        "a/b%2Fc=d&e+f ",
        "\\",
        "'\"`",
        "\r\n\t",
    ),
    *(LAST_CHARACTER, LAST_CHARACTER * 17, LAST_CHARACTER * 2_000, "x" * 15 + "\ud7ff" * 9),
    *("\ufeffbom", "\u2028\u2029\x7f\x85", "e\u0301", "\u202eabc", "x" * 300, "ü" * 5_000),
)
BYTES: Final = (b"", b"\0", b"\xff", b"\xff" * 17, b"\xff" * 5_000, b"a/b=%", b"\x80\x00" * 200)


def decimals(t: pa.DataType, *unscaled: int) -> pa.Array:
    """Return decimals of these digits, unchecked, as a client may send them."""
    data = b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled)
    return pa.Array.from_buffers(t, len(unscaled), [None, pa.py_buffer(data)])


def times(t: pa.DataType, *numbers: int) -> pa.Array:
    """Return dates of these days, or timestamps of these microseconds, since 1970."""
    return pa.array(numbers, pa.int32() if pa.types.is_date32(t) else pa.int64()).view(t)


def _integers(t: pa.DataType) -> pa.Array:
    half = 1 << (t.bit_width - 1)
    return pa.array([-half, 1 - half, -1, 0, 1, half - 1], t)


def _decimal(precision: int, scale: int) -> pa.Array:
    most = 10**precision - 1
    return decimals(pa.decimal128(precision, scale), -most, 1 - most, -1, 0, 1, most)


def _simple() -> dict[str, pa.Array]:
    utc, local = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
    payloads = pa.array(NAN_PAYLOADS, pa.uint64()).view(pa.float64())
    return {
        "flag": pa.array([False, True]),
        "tiny": _integers(pa.int8()),
        "small": _integers(pa.int16()),
        "number": _integers(pa.int32()),
        "big": _integers(pa.int64()),
        "ratio": pa.array([f for f in FLOATS if not 3.5e38 < abs(f) < 1e309], pa.float32()),
        "amount": pa.concat_arrays([pa.array(FLOATS, pa.float64()), payloads]),
        "price": _decimal(5, 2),
        "wide": _decimal(18, 18),
        "huge": _decimal(38, 10),
        "digits": _decimal(38, 0),
        "name": pa.array(TEXTS),
        "raw": pa.array(BYTES, pa.binary()),
        "day": times(pa.date32(), *DAYS),
        "at": times(utc, *MICROSECONDS),
        "local": times(local, *MICROSECONDS),
    }


def _nested(simple: dict[str, pa.Array]) -> dict[str, pa.Array]:
    days, moments, names = simple["day"], simple["at"], simple["name"]
    no_bytes = pa.array([0, 0, 1, 3, 3, len(days)], pa.int32())
    inner = pa.StructArray.from_arrays([days, simple["digits"].take(_cycle(6, 8))], ["d", "n"])
    lists = pa.ListArray.from_arrays(no_bytes, inner)
    return {
        "days": pa.ListArray.from_arrays(no_bytes, days),
        "moments": pa.MapArray.from_arrays(
            pa.array([0, 0, 1, len(moments)], pa.int32()), names.slice(0, len(moments)), moments
        ),
        "places": lists,
        "deep": pa.StructArray.from_arrays(
            [pa.ListArray.from_arrays(pa.array([0, 2, 2, 5], pa.int32()), lists)], ["l"]
        ),
    }


def _cycle(length: int, count: int) -> pa.Array:
    return pa.array([i % length for i in range(count)])


EXTREMES: Final = {**_simple(), **_nested(_simple())}
"""The extremes of each column, by its name."""

TIMES: Final = ("day", "at", "local")


def extreme_rows(*names: str, start: int = 0) -> pa.Table:
    """Return rows of a column `id`, counted from `start`, and these columns, without any all.

    Every extreme of each column is in one row at least, and each column is null in one.
    """
    chosen = {name: EXTREMES[name] for name in names or EXTREMES}
    count = max(len(values) for values in chosen.values()) + 1
    columns = {
        name: pa.concat_arrays([values, pa.nulls(1, values.type)]).take(
            _cycle(len(values) + 1, count)
        )
        for name, values in chosen.items()
    }
    ids = pa.array(range(start, start + count), pa.int64())
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            *(pa.field(name, column.type) for name, column in columns.items()),
        ]
    )
    return pa.table([ids, *columns.values()], schema=schema)


def raw(array: pa.Array, *, is_loose: bool = False) -> list[Any]:
    """Return the values of an array as Python values that compare: numbers for times and floats.

    `is_loose`: a list of structs that is null counts as empty, which stock pyiceberg makes of it.
    """
    t = array.type
    if pa.types.is_date32(t):
        return list(array.view(pa.int32()).to_pylist())
    if pa.types.is_timestamp(t):
        return list(array.view(pa.int64()).to_pylist())
    if pa.types.is_floating(t):
        width = pa.int32() if t.bit_width == 32 else pa.int64()
        # What is left of the payload of a NaN is up to each engine.
        same_nan = pc.if_else(pc.is_nan(array), pa.scalar(float("nan"), t), array)
        return list(same_nan.view(width).to_pylist())
    if pa.types.is_struct(t):
        fields = [raw(child, is_loose=is_loose) for child in array.flatten()]
        rows = list(zip(*fields, strict=True))
        valid = array.is_valid().to_pylist()
        return [row if is_there else None for row, is_there in zip(rows, valid, strict=True)]
    if pa.types.is_map(t) or pa.types.is_list(t) or pa.types.is_large_list(t):
        inner = t.item_type if pa.types.is_map(t) else t.value_type
        is_empty = is_loose and pa.types.is_list(t) and pa.types.is_struct(inner)
        missing = [] if is_empty else None
        return [_items(i.values, is_loose) if i.is_valid else missing for i in array]
    return list(array.to_pylist())


def _items(values: pa.Array, is_loose: bool) -> list[Any]:
    found = raw(values, is_loose=is_loose)
    # Maps have no order.
    return sorted(found, key=repr) if pa.types.is_struct(values.type) else found


def raw_rows(
    table: pa.Table, names: Sequence[str], *, is_loose: bool = False
) -> dict[Any, tuple[Any, ...]]:
    """Return the rows by their `id`, which no two have, each as raw values of these columns."""
    columns = [raw(_one(table, name), is_loose=is_loose) for name in names]
    by_id = dict(zip(raw(_one(table, "id")), zip(*columns, strict=True), strict=True))
    assert len(by_id) == table.num_rows, "a row is there twice"
    return by_id


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def same_rows(found: pa.Table, expected: pa.Table, *, is_loose: bool = False) -> None:
    """Raise unless both have the same rows, in any order, in the columns of `expected`."""
    names = expected.column_names
    left, right = (raw_rows(rows, names, is_loose=is_loose) for rows in (found, expected))
    assert left.keys() == right.keys()
    for key, row in right.items():
        for name, value, wanted in zip(names, left[key], row, strict=True):
            assert value == wanted, f"row {key}, column {name}: {value!r} is not {wanted!r}"
