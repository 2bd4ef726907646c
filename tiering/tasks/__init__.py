"""The tasks of tiering on executors that write lake files anew: `_rewrite_task.run_rewrite`.

No module of this package imports pyiceberg or pyspark.
"""
