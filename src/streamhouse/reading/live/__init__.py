"""Live cuts: the lake snapshot and the tail of the log, as Iceberg metadata for any engine."""
