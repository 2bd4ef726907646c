"""Rows of a write: those which fit their table, and those which do not, with the reasons.

`checked_rows` is the value between readers and writers. `division` divides the rows of a write,
`row_splitter` checks a batch, `companion` defines the table of rejected rows, `_row_text` converts
rows to JSON and back, `shown_value` is a value in a message.
"""
