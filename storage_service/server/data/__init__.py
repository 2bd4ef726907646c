"""The data routes: rows in and out, by offset and by key."""
