"""Commands that work on a data directory or a journal: `serve`, and what is done to its files."""
