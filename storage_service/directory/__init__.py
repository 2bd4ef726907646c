"""What lies in a data directory: state files, the tables there are, backups of all of it."""
