"""A data directory's contents: state files, the registry of tables, table folders."""
