"""The log: dense offsets in checksummed segment files. Knows bytes only, never Arrow or HTTP."""
