"""Rows of files for `streamhouse load`: CSV, NDJSON and Parquet, in bounded memory."""
