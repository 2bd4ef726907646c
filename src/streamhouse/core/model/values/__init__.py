"""Values of Python: dates and times beyond Python's own, zones, units, JSON, order."""
