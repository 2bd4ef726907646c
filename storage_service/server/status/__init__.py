"""Metrics and the status page: `ServiceMetrics`, `StatusSampler` and the page's data."""
