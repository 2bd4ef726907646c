"""Spark's side: the format `streamhouse`, its readers and its registration."""
