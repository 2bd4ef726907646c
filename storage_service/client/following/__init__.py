"""Following tables: their logs as they grow."""
