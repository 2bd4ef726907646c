"""Predicates: from SQL text to a tree, pruning by statistics, and filtering of rows."""
