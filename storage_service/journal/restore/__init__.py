"""A data directory made what its journal says; begin at `local_copy.py`."""
