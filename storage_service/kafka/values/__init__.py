"""Records and rows: conversion between the columns of a record batch and rows of a table.

A table's `RecordFormat` maps the parts of records to columns. All functions work on whole columns,
without I/O.
"""

from __future__ import annotations

from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.records import RowRecords, records_of
from streamhouse.storage_service.kafka.values.rows import rows_of

__all__ = ["RowRecords", "SchemaSource", "records_of", "rows_of"]
