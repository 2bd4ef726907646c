"""Lake partitioning as users write it: `region`, `day(event_time)`, `bucket(16, id)`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidSchemaError, suggestion
from streamhouse.storage_service.model.schema import Schema

__all__ = ["PartitionField"]

_TIME_TRANSFORMS: Final = ("year", "month", "day", "hour")
_PLURALS: Final = {
    "years": "year",
    "months": "month",
    "days": "day",
    "hours": "hour",
    "date": "day",
}
_PARAMETER_TRANSFORMS: Final = ("bucket", "truncate")
_TEXT_MAX: Final = 1_000
_DIGITS_MAX: Final = 10
_CALL: Final = re.compile(r"\s*([A-Za-z_]+)\s*\(\s*(?:(\d+)\s*,\s*)?(.+?)\s*\)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionField:
    """One Iceberg partition field: a transform of one column.

    `transform` is identity, year, month, day, hour, bucket or truncate; `parameter` is the N of
    bucket and the width of truncate, otherwise None.
    """

    column: str
    transform: str = "identity"
    parameter: int | None = None

    @classmethod
    def parse(cls, text: str) -> PartitionField:
        """Read one partition expression; a plain name is the identity transform."""
        if len(text) > _TEXT_MAX:
            raise InvalidSchemaError(
                f"partition expression '{text[:80]}...' has more than {_TEXT_MAX} characters"
            )
        if "(" not in text:
            return cls(column=text.strip().strip("`"))
        match = _CALL.fullmatch(text)
        if match is None:
            raise InvalidSchemaError(
                f"'{text}' is not a partition expression: write col, day(col), bucket(16, col)"
                " or truncate(4, col)"
            )
        name = match.group(1).lower()
        name = _PLURALS.get(name, name)
        column = match.group(3).strip("`")
        if match.group(2) is not None and len(match.group(2)) > _DIGITS_MAX:
            raise InvalidSchemaError(
                f"partition expression '{text[:80]}': its number must be below 2**31"
            )
        parameter = None if match.group(2) is None else int(match.group(2))
        known = ["identity", *_TIME_TRANSFORMS, *_PARAMETER_TRANSFORMS]
        if name not in known:
            raise InvalidSchemaError(
                f"partition expression '{text}': unknown transform '{name}'"
                f"{suggestion(name, known)} (known: {', '.join(known)})"
            )
        if (parameter is not None) != (name in _PARAMETER_TRANSFORMS) or parameter == 0:
            raise InvalidSchemaError(
                f"partition expression '{text}': write bucket(16, col) or truncate(4, col) with a"
                " positive number, and the other transforms without one"
            )
        return cls(column=column, transform=name, parameter=parameter)

    def __str__(self) -> str:
        if self.transform == "identity":
            return self.column
        if self.parameter is not None:
            return f"{self.transform}({self.parameter}, {self.column})"
        return f"{self.transform}({self.column})"

    @property
    def name(self) -> str:
        """The partition field's name in Iceberg, as its own libraries derive it."""
        if self.transform == "identity":
            return self.column
        suffix = "trunc" if self.transform == "truncate" else self.transform
        return f"{self.column}_{suffix}"

    def check(self, schema: Schema, *, table: str) -> None:
        """Raise `InvalidSchemaError` unless the transform fits the column's type."""
        t = schema.column(self.column, table=table).type
        integer = pa.types.is_integer(t)
        text = pa.types.is_string(t)
        fits = {
            "identity": not pa.types.is_nested(t) and not pa.types.is_floating(t),
            "year": pa.types.is_date(t) or pa.types.is_timestamp(t),
            "month": pa.types.is_date(t) or pa.types.is_timestamp(t),
            "day": pa.types.is_date(t) or pa.types.is_timestamp(t),
            "hour": pa.types.is_timestamp(t),
            "bucket": is_bucketable(t),
            "truncate": integer or text or pa.types.is_decimal(t) or pa.types.is_binary(t),
        }[self.transform]
        if not fits:
            raise InvalidSchemaError(
                f"table '{table}': partition field '{self}' does not fit column"
                f" '{self.column}' of type {t}"
            )


def is_bucketable(t: pa.DataType) -> bool:
    """Whether Iceberg's bucket transform accepts the type (spec, appendix B)."""
    return bool(
        pa.types.is_integer(t)
        or pa.types.is_decimal(t)
        or pa.types.is_date(t)
        or pa.types.is_timestamp(t)
        or pa.types.is_string(t)
        or pa.types.is_binary(t)
    )
