"""Commands for a table and its rows: the first that people type."""
