"""Every option of the format, read and checked; names of tables."""
