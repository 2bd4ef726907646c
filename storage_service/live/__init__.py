"""Live cuts of the service's tables, for doors that show tables to other engines."""
