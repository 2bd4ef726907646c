"""Rows of a bucket in memory: an index by hash, an arena, what is not written yet, the budget.

The entries are `row_cache.RowCache` and `write_behind.WriteBehind`; README.md says how they fit.
"""
