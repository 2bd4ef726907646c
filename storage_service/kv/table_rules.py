"""The facts of a table needed for its rows by key: schema, key, and merging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamhouse.core.model.lake.limits import NO_LIMITS, LakeLimits
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.reading.where.checks import NO_CHECKS, Checks

__all__ = ["TableRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRules:
    """The facts of a primary key table needed for planning.

    `earlier` are older schema versions of stored rows, by id. With `renews_unchanged` an upsert
    without a change still makes a new version of the row, because rows age by their versions.
    """

    table: str
    schema: Schema
    primary_key: tuple[str, ...]
    merge: MergeRules
    schema_id: int = 0
    earlier: Mapping[int, Schema] = field(default_factory=dict)
    limits: LakeLimits = NO_LIMITS
    checks: Checks = NO_CHECKS
    renews_unchanged: bool = False
