"""Consumer groups: their members, and the positions that they commit; begin at `group_apis.py`."""
