"""Warns of a stream that joins an attached name and would keep the rows of the first micro-batch.

Spark plans the relation afresh for a micro-batch only with a filter to offer. Spark finds the
filter "the column is not null" for a join that compares a column by `=` or `<`, and no filter for a
join without a condition or by `<=>`. The warning comes at the start of the stream, if Spark's
optimizer is within reach: not under Spark Connect.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from typing import Any, Final

from streamhouse.connector.names._attached_names import SESSION_CATALOG, attached_in
from streamhouse.connector.names._wrapped_methods import has_jvm

__all__ = ["stale_relations", "warn_of_stale_names"]

# A node in Spark's text of a plan, behind the lines of the tree.
_NODE: Final = re.compile(r"[ :+-]*~?(?P<node>.*)")
_RELATION: Final = re.compile(rf"RelationV2\[.*\] {SESSION_CATALOG}\.(?P<name>\S+)\s*$")
# Spark adds this filter for every column in a comparison.
_OFFERED: Final = re.compile(r"is(not)?null\([^()]*#\d+L?\)")


def stale_relations(plan: str, names: Collection[str]) -> list[str]:
    """Return the `names`, as `database.name`, that an optimized plan has without a filter."""
    stale: set[str] = set()
    above = ""
    for line in plan.splitlines():
        matched = _NODE.match(line)
        node = matched["node"] if matched is not None else ""
        relation = _RELATION.match(node)
        # A filter's input is the line below the filter; any other line above is another branch.
        is_filtered = above.startswith("Filter") and _OFFERED.search(above) is not None
        if relation is not None and relation["name"].lower() in names and not is_filtered:
            stale.add(relation["name"].lower())
        above = node
    return sorted(stale)


def warn_of_stale_names(writer: Any) -> None:
    """Warn of attached names whose rows a starting stream would read only once."""
    frame = getattr(writer, "_df", None)
    if frame is None or not has_jvm(frame.sparkSession):
        return
    spark = frame.sparkSession
    analyzed = frame._jdf.queryExecution().analyzed()
    names = {name.sql_name for name in attached_in(spark, analyzed.toString())}
    if not names:
        return
    try:
        plan = spark._jsparkSession.sessionState().optimizer().execute(analyzed).toString()
    except Exception:  # noqa: BLE001 - the start of the query raises a better error
        return
    for name in stale_relations(plan, names):
        warnings.warn(
            f"the stream joins the attached name '{name}' without comparing its columns, so every"
            " micro-batch would have the rows of the first one: join spark.table(...) of the name,"
            " or spark.read.format('streamhouse').load(...), or a temporary view of it",
            # The levels: this function, the hook, the wrapper around the hook, and the program.
            stacklevel=4,
        )
