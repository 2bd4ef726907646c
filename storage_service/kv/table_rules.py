"""What the rows by key of one table must know of the table: its schema, its key, how rows merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamhouse.core.model.lake.limits import NO_LIMITS, LakeLimits
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema

__all__ = ["TableRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRules:
    """What planning needs to know of a primary key table.

    `earlier` are the versions of the schema, by id, that stored rows may still have. Of a table
    that `renews_unchanged`, an upsert that leaves a row as it is makes a new version of it all the
    same: its rows age by their versions.
    """

    table: str
    schema: Schema
    primary_key: tuple[str, ...]
    merge: MergeRules
    schema_id: int = 0
    earlier: Mapping[int, Schema] = field(default_factory=dict)
    limits: LakeLimits = NO_LIMITS
    renews_unchanged: bool = False
