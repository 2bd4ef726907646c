"""A partition as in a path, and in `$files`: `day=2024-12-31/region=NL`.

Labels are pyiceberg's, except for days and times: pyiceberg's stop at the years 1 and 9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote_plus

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform, Transform
from pyiceberg.types import DateType, IcebergType, TimestampType, TimestamptzType

from streamhouse.core.model.values.calendar import date_text, timestamp_text

__all__ = ["partition_labels"]

_HOUR_US: Final = 3_600_000_000
_HOUR_CHARACTERS: Final = len(":00:00")


def partition_labels(
    spec: PartitionSpec, schema: Schema, partitions: Sequence[Sequence[Any]]
) -> list[str]:
    """Return the label of each of the partitions, which are values of the spec's fields."""
    kinds = [field.field_type for field in spec.partition_type(schema).fields]
    names = [quote_plus(field.name, safe="") for field in spec.fields]
    transforms = [field.transform for field in spec.fields]
    return [
        "/".join(
            f"{name}={quote_plus(_text(transform, kind, value), safe='')}"
            for name, transform, kind, value in zip(names, transforms, kinds, values, strict=True)
        )
        for values in partitions
    ]


def _text(transform: Transform[Any, Any], kind: IcebergType, value: Any) -> str:
    if not isinstance(value, int):
        return transform.to_human_string(kind, value)
    match transform, kind:
        case (DayTransform(), _) | (IdentityTransform(), DateType()):
            return date_text(value)
        case HourTransform(), _:
            return timestamp_text(value * _HOUR_US, separator="-")[:-_HOUR_CHARACTERS]
        case IdentityTransform(), TimestampType():
            return timestamp_text(value)
        case IdentityTransform(), TimestamptzType():
            return f"{timestamp_text(value)}+00:00"
    return transform.to_human_string(kind, value)
