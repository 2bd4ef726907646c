"""The log: dense offsets in checksummed segment files. Knows bytes only, never Arrow or HTTP.

The doors are `log_tablet.LogTablet`, the log of one bucket, and `group_commit.GroupCommitter`,
which appends to many. What is appended is an `append_queue.RoutedBatch`.
"""
