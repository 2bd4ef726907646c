"""`spark.table` and `spark.read.table` of an attached name: a DataFrame of current rows.

Spark plans the relation of a SQL name once, so a kept DataFrame has the rows of its first use for
good. Every statement plans a load of our format afresh. Therefore these calls return a load, with
the name's options and under the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamhouse.connector.names._attached_names import attached, is_attached
from streamhouse.connector.names._table_statement import name_parts
from streamhouse.reading.options.options import BATCH, FORMAT, applicable
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["load_of_name"]


def load_of_name(spark: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the load of an attached name; None leaves the call to Spark.

    `options` are the reader's, in addition to the name's.
    """
    parts = name_parts(name)
    name_of_table = attached(spark, parts)
    if name_of_table is None:
        return None
    # A view of the session with the same name goes first, and cached rows stay.
    if not is_attached(spark, ".".join(map(quoted, parts))) or spark.catalog.isCached(name):
        return None
    reader_keys = {key.lower() for key in options}
    name_options = {
        key: value
        for key, value in applicable(name_of_table.options, uses=(BATCH,)).items()
        if key.lower() not in reader_keys
    }
    frame = spark.read.format(FORMAT).options(**name_options, **options).load()
    return frame.alias(parts[-1])
