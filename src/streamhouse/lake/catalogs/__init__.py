"""The catalogs behind ours: opened by configuration alone, and guarded against what they say.

The doors are `sql_catalog.open_catalog`, and `open_catalog.OpenCatalog` which does it once.
"""
