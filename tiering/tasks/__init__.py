"""What tiering runs on executors: a range of the log, or lake files, to Parquet files.

The doors are `lake_task.run_split` and `rewrite_task.run_rewrite`. Nothing here knows Iceberg's
library or Spark.
"""
