"""Topics: described, created, dropped and configured by clients.

`_admin_apis.py` lists the APIs; `_topic_tables.py` finds the table of a topic.
"""
