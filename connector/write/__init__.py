"""Writes: checked before any task starts, then one transaction, or requests sent at once."""
