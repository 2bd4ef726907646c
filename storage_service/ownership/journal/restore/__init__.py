"""A data directory made what its journal says; begin at `_start.py`."""
