"""The Iceberg REST protocol of the service, over any catalog; Iceberg itself is in `lake/`.

The entry is `rest_api.RestCatalogApi`, loaded at the first use.
"""
