"""Rows as texts: NDJSON and CSV that come in, JSON that goes out, all by whole columns.

`divide_ndjson` and `divide_csv` read a body; `row_texts` writes rows.
"""
