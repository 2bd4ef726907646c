"""The catalogs behind ours: opened by configuration alone, and guarded against what they say."""
