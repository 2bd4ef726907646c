"""Commands on a data directory or a journal: `serve`, and the care of its files."""
