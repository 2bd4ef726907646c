"""Decimals from outside, judged before Arrow sees them.

Arrow looks its powers of ten up in tables of its own. Of a decimal, or of a text that it casts to
one, whose exponent is far from the scale of the column, it reads beyond them: the number becomes
another one, as 1e-77 became 0.00, or the process ends, as that of 1e-100000000 did. So whatever has
an exponent, or more digits than any type, is read here, and refused unless it is exactly a value of
the type. What Arrow gets of it has the scale of its column, and no exponent.

The same goes for numbers that become integers: 1e100000000 is a hundred million digits.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError

__all__ = ["NUMBER", "as_decimal", "as_integer", "castable_texts", "decimal_of_text", "is_near"]

NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""What a text writes that is one number."""
_DIGITS_MAX: Final = 40
"""More than any type of a column has."""
_SCALE_MAX: Final = 38
_EXACT: Final = Context(
    prec=_DIGITS_MAX, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact, InvalidOperation]
)


def as_decimal(value: int | Decimal, t: pa.DataType) -> Decimal:
    """Return a number with the scale of the decimal type `t`.

    Raises ValueError or ArithmeticError if it is none of its values.
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
    """Whether Arrow makes a number what it is, or refuses it: its exponent is in Arrow's tables."""
    return number.is_finite() and int(number.as_tuple().exponent) >= -_SCALE_MAX


def as_integer(number: Decimal) -> int:
    """Return a number without a fraction; raises ValueError if it has one, or is of no type."""
    if not number:
        return 0
    if number.adjusted() >= _DIGITS_MAX or number != number.to_integral_value():
        raise ValueError("it is no integer")
    return int(number)


def decimal_of_text(text: str, t: pa.DataType) -> Decimal:
    """Return what `as_decimal` does of the number that a text writes, blanks around it."""
    text = text.strip()
    if NUMBER.fullmatch(text) is None:
        raise ValueError("it is no number")
    return as_decimal(Decimal(text), t)


def castable_texts(texts: pa.Array, t: pa.DataType) -> pa.Array:
    """Return texts that Arrow may cast to the decimal type `t`, with the same numbers as `texts`.

    Those with an exponent are written without it, and long ones anew. Raises `SchemaMismatchError`
    if one of these is no value of `t`.
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
            raise SchemaMismatchError(f"{text[:100]!r} is no {t}: {error}") from error
    return pc.replace_with_mask(texts, is_odd, pa.array(plain, texts.type))
