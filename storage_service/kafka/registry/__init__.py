"""Record schemas by subject, version and id, and the table changes that a schema needs.

`schema_set.py` is the entry.
"""
