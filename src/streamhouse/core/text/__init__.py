"""Rows as texts: NDJSON and CSV in requests, JSON in responses, all by whole columns.

`divide_ndjson` and `divide_csv` read a body; `row_texts` writes rows.
"""
