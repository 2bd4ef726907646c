"""Rows that do not fit their table: found, kept as JSON in a table beside it, tried again.

`companion` is that table, `division` divides what is to be written, `row_splitter` finds the rows
of a batch, `row_text` makes them JSON and back.
"""
