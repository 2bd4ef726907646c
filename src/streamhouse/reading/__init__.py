"""Union reads without Spark: predicates, plans, scans, streams, DuckDB, imports."""
