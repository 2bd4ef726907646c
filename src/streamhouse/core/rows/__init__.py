"""Rows of a write: those which fit their table, and those which do not, with the reasons.

`division` divides the rows of a write, `row_splitter` finds the bad rows of a batch, `companion`
defines the table of rejected rows, `row_text` converts rows to JSON and back.
"""
