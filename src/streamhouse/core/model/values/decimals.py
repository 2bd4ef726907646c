"""Decimals from outside, checked before Arrow sees them.

Arrow looks up powers of ten in fixed tables. For a decimal or text whose exponent is far from the
column's scale, Arrow reads beyond the tables: the number becomes another number, as 1e-77 became
0.00, or the process ends, as with 1e-100000000. This module therefore reads every number with an
exponent, or with more digits than any type, and refuses a number unless the type holds its exact
value. Arrow only receives numbers with the column's scale and without an exponent.

Numbers for integer columns are checked the same way: 1e100000000 is a hundred million digits.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.schema import type_name

__all__ = [
    "NUMBER",
    "as_decimal",
    "as_integer",
    "castable_texts",
    "decimal_of",
    "decimal_of_text",
    "is_near",
]

NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""The text of one number."""
_DIGITS_MAX: Final = 40
"""More digits than any column type has."""
_SCALE_MAX: Final = 38
_EXACT: Final = Context(
    prec=_DIGITS_MAX, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact, InvalidOperation]
)


def as_decimal(value: int | Decimal, t: pa.DataType) -> Decimal:
    """Return a number with the scale of the decimal type `t`.

    Raises ValueError or ArithmeticError if `t` does not hold the number.
    """
    number = Decimal(value)
    if not number.is_finite():
        raise ValueError("it is no number")
    if not number:
        return Decimal((0, (0,), -t.scale))
    if number.adjusted() >= t.precision - t.scale:
        raise ValueError("it has too many digits")
    return number.quantize(Decimal((0, (1,), -t.scale)), context=_EXACT)


def is_near(number: Decimal) -> bool:
    """Whether Arrow reads the number exactly or refuses: the exponent is in Arrow's tables."""
    return number.is_finite() and int(number.as_tuple().exponent) >= -_SCALE_MAX


def as_integer(number: Decimal) -> int:
    """Return a number without a fraction; raises ValueError for a fraction, or too many digits."""
    if not number:
        return 0
    if number.adjusted() >= _DIGITS_MAX or number != number.to_integral_value():
        raise ValueError("it is no integer")
    return int(number)


def decimal_of(unscaled: int, scale: int) -> Decimal:
    """Return `unscaled` with `scale` digits behind the point, exactly."""
    # From a tuple: arithmetic would round to the context's precision.
    digits = tuple(int(digit) for digit in str(abs(unscaled)))
    return Decimal((int(unscaled < 0), digits, -scale))


def decimal_of_text(text: str, t: pa.DataType) -> Decimal:
    """Return the number of a text, with blanks around it allowed, like `as_decimal`."""
    text = text.strip()
    if NUMBER.fullmatch(text) is None:
        raise ValueError("it is no number")
    return as_decimal(Decimal(text), t)


def castable_texts(texts: pa.Array, t: pa.DataType) -> pa.Array:
    """Return texts that Arrow may cast to the decimal type `t`, with the same numbers as `texts`.

    A number with an exponent is written without its exponent, and a long number is written anew.
    Raises `SchemaMismatchError` if `t` does not hold such a number.
    """
    is_odd = pc.greater(pc.binary_length(texts), _SCALE_MAX)
    for letter in "eE":
        is_odd = pc.or_(is_odd, pc.match_substring(texts, letter))
    is_odd = pc.fill_null(is_odd, False)
    if not pc.any(is_odd).as_py():
        return texts
    plain = []
    for text in texts.filter(is_odd).to_pylist():
        try:
            plain.append(f"{decimal_of_text(text, t):f}")
        except (ValueError, ArithmeticError) as error:
            raise SchemaMismatchError(f"{text[:100]!r} is no {type_name(t)}: {error}") from error
    return pc.replace_with_mask(texts, is_odd, pa.array(plain, texts.type))
