"""Fetch and ListOffsets: records go out, of the log and of the lake; begin at `fetch.py`."""
