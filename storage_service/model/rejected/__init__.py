"""Rows that do not fit their table: found, kept as JSON in a table beside it, tried again.

`companion` is that table, `row_splitter` finds the rows, `row_text` makes them JSON and back.
"""
