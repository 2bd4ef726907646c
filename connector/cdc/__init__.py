"""Change data capture: envelopes unwrapped into changes, and the history of a table's rows.

The public functions are `debezium` (`_envelope.py`) and `scd2` (`_history.py`), as
`streamhouse.cdc`.
"""

from __future__ import annotations

from streamhouse.connector.cdc._envelope import debezium
from streamhouse.connector.cdc._history import scd2

__all__ = ["debezium", "scd2"]
