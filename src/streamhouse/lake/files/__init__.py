"""Lake files: reading and writing with pyarrow, statistics, deletes and layout."""
