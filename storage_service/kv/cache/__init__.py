"""Rows of a bucket in memory: an index by hash, an arena, what is not written yet, the budget."""
