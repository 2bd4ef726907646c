"""What executors load: reading a split of the lake or of the log, without the lake library."""
