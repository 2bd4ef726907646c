"""Rows changed as a table's: `Table` merges, updates and deletes, each in one transaction, once.

The door is `table.py`. `merge.py` makes Spark compute the rows that a merge writes; `commit.py`
stages them and commits them if nobody has changed what they were computed from, else does it anew.
"""
