"""The catalogs behind ours: opened by configuration alone, and guarded against their own answers.

`open_catalog.OpenCatalog` opens the catalog once.
"""
