"""The lake rows of a table without the log: rows that left the log, lost rows by key, checks."""
