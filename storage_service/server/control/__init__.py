"""The control routes: tables, transactions, tiering, backups, and the Iceberg catalog.

`build_control_plane` makes the FastAPI application, `IcebergRoutes` answers below `/iceberg`.
"""
