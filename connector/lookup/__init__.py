"""The rows of a primary key table looked up for the rows of a DataFrame, in batch and in a stream.

The doors are `lookup_join.lookup_join` and `lookup_join.register_lookup`. They plan on the driver
(`lookup_plan.py`). On executors `joined_batches.py` takes batches, `key_rows.py` remembers what is
known of their keys (`key_index.py` finds them, `row_values.py` takes the values), and
`row_source.py` asks the service for the others, or reads the whole table where that is cheaper
(`whole_rows.py`, of a `table_cut.py`): once for all tasks of a machine (`shared_tables.py`), and
after a write only what has changed.
"""
