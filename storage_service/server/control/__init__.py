"""The control routes: tables, transactions, tiering, backups, and the Iceberg catalog."""
