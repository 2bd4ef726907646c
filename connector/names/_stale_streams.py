"""A stream that joins an attached name whose rows would stay those of the first micro-batch.

Spark plans such a relation afresh for a micro-batch only if it has a filter to offer to it. It
finds one by itself, "the column is not null", for a join that compares a column by `=` or `<`, and
none for a join without a condition or by `<=>`. That is said when the stream starts, where Spark's
optimizer can be asked: not under Spark Connect.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from typing import Any, Final

from streamhouse.connector.names._asked_first import has_jvm
from streamhouse.connector.names._attached_names import SESSION_CATALOG, attached_in

__all__ = ["stale_relations", "warn_of_stale_names"]

# A node of a plan as Spark shows it, behind the lines of its tree.
_NODE: Final = re.compile(r"[ :+-]*~?(?P<node>.*)")
_RELATION: Final = re.compile(rf"RelationV2\[.*\] {SESSION_CATALOG}\.(?P<name>\S+)\s*$")
# Spark adds it for every column that a condition compares with something.
_OFFERED: Final = re.compile(r"is(not)?null\([^()]*#\d+L?\)")


def stale_relations(plan: str, names: Collection[str]) -> list[str]:
    """Return those of `names`, `database.name`, that an optimized plan has without a filter."""
    found: set[str] = set()
    above = ""
    for line in plan.splitlines():
        matched = _NODE.match(line)
        node = matched["node"] if matched is not None else ""
        relation = _RELATION.match(node)
        # What a filter is for is the line below it; any other line above ends another branch.
        is_filtered = above.startswith("Filter") and _OFFERED.search(above) is not None
        if relation is not None and relation["name"].lower() in names and not is_filtered:
            found.add(relation["name"].lower())
        above = node
    return sorted(found)


def warn_of_stale_names(writer: Any) -> None:
    """Warn of attached names that a stream, about to be started, would read once and for all."""
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
    except Exception:  # noqa: BLE001 - what is wrong with the query, its start says better
        return
    for name in stale_relations(plan, names):
        warnings.warn(
            f"the stream joins the attached name '{name}' without comparing its columns, so every"
            " micro-batch would have the rows of the first one: join spark.table(...) of the name,"
            " or spark.read.format('streamhouse').load(...), or a temporary view of it",
            # This function, what is in the place of Spark's method, what calls that, the program.
            stacklevel=4,
        )
