"""The tasks of tiering on executors: from a range of the log, or from lake files, to Parquet files.

`_lake_task.run_split` and `_rewrite_task.run_rewrite` run a task. No module of this package
imports pyiceberg or pyspark.
"""
