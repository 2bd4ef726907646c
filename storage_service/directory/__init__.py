"""A data directory's contents: state files, the table registry, table folders."""
