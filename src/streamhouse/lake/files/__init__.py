"""Lake files: reading and writing them with pyarrow, their statistics, deletes and layout."""
