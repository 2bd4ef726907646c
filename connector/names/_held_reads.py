"""`spark.table` and `spark.read.table` of an attached name: a DataFrame that stays current.

Spark plans the relation of a SQL name once, and a DataFrame that is kept then has the rows of its
first use for good. A load of our format is planned afresh by each statement on it, so that is what
these calls return, with the name's options and called by the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamhouse.connector.names._attached_names import attached, is_attached
from streamhouse.connector.names._statement import name_parts
from streamhouse.reading.options.options import BATCH, FORMAT, applicable
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["planned_afresh"]


def planned_afresh(spark: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the load that an attached name stands for; None for what is Spark's own business.

    `options` are the reader's, beyond the name's.
    """
    parts = name_parts(name)
    found = attached(spark, parts)
    if found is None:
        return None
    # A view of the session may have the name, too, and goes first; rows that are cached stay.
    if not is_attached(spark, ".".join(map(quoted, parts))) or spark.catalog.isCached(name):
        return None
    own = {key.lower() for key in options}
    of_name = {
        key: value
        for key, value in applicable(found.options, uses=(BATCH,)).items()
        if key.lower() not in own
    }
    frame = spark.read.format(FORMAT).options(**of_name, **options).load()
    return frame.alias(parts[-1])
