"""The log: dense offsets in checksummed segment files, independent of Arrow and HTTP.

Entry points: `log_tablet.LogTablet`, the log of one bucket, and `group_commit.GroupCommitter`,
appending to many logs. The unit of an append is an `append_queue.RoutedBatch`.
"""
