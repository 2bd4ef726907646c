"""SQL names of tables: what statements on them do beyond what Spark does. Door: `hooks`."""
