"""Changes of a table by Spark: `Table` merges, updates and deletes, each in one transaction, once.

The public class is in `table.py`. `_merge.py` makes Spark compute the rows that a merge writes.
`_commit.py` stages the rows, and commits if the rows read by Spark are unchanged. After a conflict
the change is computed again.
"""
