"""What service, connector and tiering share of Iceberg: the rules for lake tables, and landing."""
