"""Records and rows: what the columns of a record batch are to a table, and the other way round.

What comes from where is a table's `RecordFormat`. All works on whole columns, and does no I/O.
"""

from __future__ import annotations

from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.records import RowRecords, records_of
from streamhouse.storage_service.kafka.values.rows import RecordRows, rows_of

__all__ = ["RecordRows", "RowRecords", "SchemaSource", "records_of", "rows_of"]
