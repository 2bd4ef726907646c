"""Writes: checked before any task starts, then direct or as one transaction."""
