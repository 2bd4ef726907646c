"""The Iceberg REST catalog of the service, over any pyiceberg catalog; loaded when first used."""
