"""Predicates: from SQL text to a tree, pruning by statistics, and the rows they keep."""
