"""Commits to lake tables: a round's snapshot, replacements, expiry, and orphans.

`committer.IcebergLakeTable`, `replacement`, `expiry` and `orphans` have the commits.
"""
