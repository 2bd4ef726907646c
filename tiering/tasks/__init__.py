"""What tiering runs on executors: a range of the log, or lake files, to Parquet files."""
