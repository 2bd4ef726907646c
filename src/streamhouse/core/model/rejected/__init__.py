"""Rows which do not fit their table: found, stored as JSON in a companion table, retried.

`companion` defines the companion table, `division` divides the rows of a write, `row_splitter`
finds the bad rows of a batch, `row_text` converts rows to JSON and back.
"""
