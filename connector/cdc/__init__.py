"""Change data capture: envelopes unwrapped into changes, and the history of a table's rows.

`streamhouse.cdc` has the public functions `debezium` and `scd2`; docs/spark_changes.md shows both.
"""

from __future__ import annotations

from streamhouse.connector.cdc._envelope import debezium
from streamhouse.connector.cdc._history import scd2

__all__ = ["debezium", "scd2"]
