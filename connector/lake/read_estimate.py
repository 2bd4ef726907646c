"""How many bytes of a lake file a read decodes, guessed from what manifests say of it.

Files of a batch layout have row groups of narrow ranges of what they are sorted by, and a read
skips those that its predicate rules out. Manifests have no bounds of row groups: the file's own
range is cut into equal parts instead, and the predicate asked about each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Final

from streamhouse.connector.where.predicate import Predicate
from streamhouse.connector.where.pruning import may_match
from streamhouse.storage_service.lake.files.bounds import ColumnStatistics, statistics_key
from streamhouse.storage_service.model.partitioning import Clustering

__all__ = ["read_share"]

PARTS_MAX: Final = 8
UNKNOWN_SHARE: Final = 0.5
"""What a predicate on a sorted column of text is taken to read: there is no middle of a range."""


def read_share(
    predicate: Predicate,
    statistics: Mapping[str, ColumnStatistics],
    clustering: Clustering,
    *,
    row_groups: int,
) -> float:
    """Return which share of a file's row groups the predicate cannot rule out, from 0 to 1."""
    if row_groups < 2:
        return 1.0
    keys = [statistics_key((name,)) for name in clustering.columns]
    asked = {statistics_key((name,)) for name in predicate.columns}
    if not clustering.is_z_order:
        # The first column that varies in the file decides; those after it are mixed.
        varying = [key for key in keys if not _is_constant(statistics.get(key))]
        keys = varying[:1]
    share = 1.0
    for key in keys:
        if key in asked:
            parts = min(PARTS_MAX, max(2, round(row_groups ** (1 / len(keys)))))
            share *= _share(predicate, statistics, key, parts)
    return share


def _is_constant(column: ColumnStatistics | None) -> bool:
    return column is not None and column.minimum is not None and column.minimum == column.maximum


def _share(
    predicate: Predicate, statistics: Mapping[str, ColumnStatistics], key: str, parts: int
) -> float:
    column = statistics.get(key)
    if column is None:
        return 1.0
    found = [may_match(predicate, {**statistics, key: part}) for part in _parts(column, parts)]
    return sum(found) / len(found) if found else UNKNOWN_SHARE


def _parts(column: ColumnStatistics, count: int) -> Iterator[ColumnStatistics]:
    """Yield the column's statistics in equal parts of its range; none if that has no middle."""
    low, high = column.minimum, column.maximum
    if isinstance(low, bool) or isinstance(high, bool):
        return
    if isinstance(low, int) and isinstance(high, int):
        for i in range(count):
            start, end = (low + (high - low) * at // count for at in (i, i + 1))
            yield replace(column, minimum=start, maximum=end)
    elif isinstance(low, float | Decimal) and isinstance(high, float | Decimal):
        bottom, width = float(low), float(high) - float(low)
        if not math.isfinite(width):
            return
        for i in range(count):
            start_f, end_f = (bottom + width * at / count for at in (i, i + 1))
            if isinstance(low, Decimal):
                yield replace(column, minimum=Decimal(start_f), maximum=Decimal(end_f))
            else:
                yield replace(column, minimum=start_f, maximum=end_f)
