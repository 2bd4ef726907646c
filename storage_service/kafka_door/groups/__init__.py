"""Consumer groups: members and committed positions. `_group_apis.py` is the entry."""
