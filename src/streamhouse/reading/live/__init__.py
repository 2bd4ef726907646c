"""Live cuts: a lake table with the rows of the log, in metadata that is never committed."""
