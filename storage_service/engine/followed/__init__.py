"""The logs of a directory that another process writes, for fetches at a standby."""
