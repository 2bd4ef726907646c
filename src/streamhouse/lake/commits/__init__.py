"""Commits to lake tables: a round's snapshot, replacements, expiry, and the files nobody needs.

The doors are `committer.IcebergLakeTable`, `replacement`, `expiry` and `orphans`.
"""
