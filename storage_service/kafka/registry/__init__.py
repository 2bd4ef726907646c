"""Schemas of records by subject, version and id, and what a table must become to have their values.

Begin at `schema_set.py`.
"""
