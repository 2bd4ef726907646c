"""Topics: what clients ask of them, and make, drop and change; their tables are found in one place.

`admin_apis.py` names what answers each API; `topic_tables.py` finds the table of a topic.
"""
