"""What people look at: metrics, the status page, log lines."""
