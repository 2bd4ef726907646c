"""Fetch and ListOffsets: records of the log and of the lake go out. `_fetch.py` is the entry."""
