"""Whether a partition, or any partition of a manifest, may have rows for an expression.

Invariant: a partition left out has no accepted row. `truncate(w, c)` of the lowest values of a type
lies below the type, and the partition becomes another value: the type's least value, or the
wrapped-around number. No other partition of the field is similar: each is a multiple of the width.
These partitions are never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions.visitors import (
    expression_evaluator,
    inclusive_projection,
    manifest_evaluator,
)
from pyiceberg.manifest import ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import TruncateTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DecimalType, IntegerType, LongType, PrimitiveType

from streamhouse.lake.snapshots.expressions import Expression

__all__ = ["PartitionFilter"]

_INT_BITS: Final = 32
_LONG_BITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truncated:
    """A field `truncate(width, c)` of numbers, all as unscaled integers."""

    position: int
    kind: PrimitiveType
    width: int
    least: int
    greatest: int

    def is_outside(self, value: Any) -> bool:
        """Whether a partition is that of values which are cut to something below the type."""
        return value is not None and _unscaled(value) % self.width != 0

    def may_be_outside(self, manifest: ManifestFile) -> bool:
        """Whether a manifest may have such a partition."""
        if not manifest.partitions:
            return True
        summary = manifest.partitions[self.position]
        if summary.lower_bound is None or summary.upper_bound is None:
            return True
        low = _unscaled(from_bytes(self.kind, summary.lower_bound))
        high = _unscaled(from_bytes(self.kind, summary.upper_bound))
        return low < self.least + self.width or high > self.greatest - self.width


class PartitionFilter:
    """Tells which partitions of a table may have rows that an expression accepts."""

    def __init__(
        self, specs: Mapping[int, PartitionSpec], schema: Schema, expression: Expression
    ) -> None:
        self._specs = specs
        self._schema = schema
        self._expression = expression
        self._tests: dict[int, _SpecTest | None] = {}

    def may_match_manifest(self, manifest: ManifestFile) -> bool:
        """Return False if no partition of the manifest has such a row."""
        test = self._test(manifest.partition_spec_id)
        return test is None or test.may_match_manifest(manifest)

    def matches(
        self, spec_id: int, partitions: Sequence[tuple[Any, ...]]
    ) -> npt.NDArray[np.bool_] | None:
        """Return for each partition of a spec whether it may have accepted rows; None: all may."""
        test = self._test(spec_id)
        if test is None:
            return None
        matches = (test.may_match(partition) for partition in partitions)
        return np.fromiter(matches, dtype=np.bool_, count=len(partitions))

    def _test(self, spec_id: int) -> _SpecTest | None:
        if spec_id not in self._tests:
            try:
                test = _SpecTest(self._specs[spec_id], self._schema, self._expression)
            except ValueError:
                # A column that the lake does not have yet cannot be bound: any row may match.
                test = None
            self._tests[spec_id] = test
        return self._tests[spec_id]


class _SpecTest:
    """The test of a partition spec; raises `ValueError` for an unknown column."""

    def __init__(self, spec: PartitionSpec, schema: Schema, expression: Expression) -> None:
        projected = inclusive_projection(schema, spec)(expression)
        fields = spec.partition_type(schema).fields
        self._matches = expression_evaluator(Schema(*fields), projected, case_sensitive=True)
        self._manifest_matches: Callable[[ManifestFile], bool] = manifest_evaluator(
            spec, schema, projected
        )
        self._truncated = _truncated_fields(spec, [field.field_type for field in fields])

    def may_match_manifest(self, manifest: ManifestFile) -> bool:
        """Return False if no partition of the manifest has a row that the expression accepts."""
        is_outside = any(field.may_be_outside(manifest) for field in self._truncated)
        return is_outside or self._manifest_matches(manifest)

    def may_match(self, partition: tuple[Any, ...]) -> bool:
        """Return False if the partition has no row that the expression accepts."""
        for field in self._truncated:
            if field.is_outside(partition[field.position]):
                return True
        return self._matches(Record(*partition))


def _truncated_fields(spec: PartitionSpec, kinds: Sequence[Any]) -> list[_Truncated]:
    fields = []
    for position, (field, kind) in enumerate(zip(spec.fields, kinds, strict=True)):
        if not isinstance(field.transform, TruncateTransform):
            continue
        if isinstance(kind, IntegerType | LongType):
            bits = _INT_BITS if isinstance(kind, IntegerType) else _LONG_BITS
            least, greatest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        elif isinstance(kind, DecimalType):
            greatest = 10**kind.precision - 1
            least = -greatest
        else:
            continue
        fields.append(
            _Truncated(
                position=position,
                kind=kind,
                width=field.transform.width,
                least=least,
                greatest=greatest,
            )
        )
    return fields


def _unscaled(value: Any) -> int:
    if not isinstance(value, Decimal):
        return int(value)
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits)))
    return -number if sign else number
