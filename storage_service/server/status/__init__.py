"""What people look at: `ServiceMetrics`, `StatusSampler` with its page, log lines."""
