"""An existing Iceberg table as the history of a new table."""
