"""SQL by DuckDB over tables of Streamhouse."""
