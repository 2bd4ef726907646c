"""Writes: checked before any task starts, and sent in one transaction or in direct requests."""
